"""How exactly does every form of Newton-Schulz orthogonalise? Against float64, over shapes, spectra and types.

    python benchmarks/muon/accuracy.py [--sides 128 256] [--seeds 3]      # CPU, two minutes of one core

"rounding": distance from the same polynomials in float64, relative, Frobenius. "polar": distance from U V^T of the
singular value decomposition in float64, which the polynomials themselves only approach. "largest": largest singular
value, 1 for U V^T. Restarts of the Gram form: before step 2, as its authors do in float16 (tridao.me/blog/2026/
gram-newton-schulz); never; and more often, which bfloat16 would need.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from woodshed.muon.newton_schulz import GRAM_RESTARTS, Triple, gram, normalised, standard, triples
from woodshed.runs import machine

ASPECTS = {"wide 3.5": 3.5, "tall 3.5": 1 / 3.5, "wide 1.5": 1.5, "square": 1.0}
"""Columns over rows; 3.5 is 2048 x 7168."""
SPECTRA = ("normal", "condition 10", "condition 1e3", "condition 1e6", "low rank")
Form = Callable[[Tensor, tuple[Triple, ...]], Tensor]
FORMS: dict[str, tuple[torch.dtype, Form]] = {
    "standard, float32": (torch.float32, standard),
    "gram, float32": (torch.float32, gram),
    "standard, bfloat16": (torch.bfloat16, standard),
    "gram, bfloat16": (torch.bfloat16, gram),
    "gram, bfloat16, restarts 1 2 3": (torch.bfloat16, lambda x, t: gram(x, t, (1, 2, 3))),
    "gram, bfloat16, restarts 2 4": (torch.bfloat16, lambda x, t: gram(x, t, (2, 4))),
    "standard, float16": (torch.float16, standard),
    "gram, float16 (chosen)": (torch.float16, gram),
    "gram, float16, never": (torch.float16, lambda x, t: gram(x, t, ())),
}


def matrix(rows: int, cols: int, spectrum: str, seed: int) -> tuple[Tensor, Tensor]:
    """A matrix with these singular values and its polar factor, (rows, cols) float64."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    u, _, v = torch.linalg.svd(made, full_matrices=False)
    m = min(rows, cols)
    if spectrum == "low rank":  # a sixteenth carries the signal, the rest is noise: what gradients look like
        values = torch.full((m,), 1e-3, dtype=torch.float64)
        values[: m // 16] = torch.linspace(1, 0.3, m // 16, dtype=torch.float64)
        made = u * values @ v
    elif spectrum != "normal":
        values = torch.logspace(0, -torch.log10(torch.tensor(float(spectrum.split()[1]))).item(), m)
        made = u * values.double() @ v
    return made, u @ v


def measure(side: int, aspect: str, spectrum: str, coefficients: Any, seeds: int) -> dict[str, list[float]]:
    """Rounding, distance from the polar factor, and largest singular value of every form; worst over seeds."""
    ratio = ASPECTS[aspect]
    rows, cols = (side, round(side * ratio)) if ratio >= 1 else (round(side / ratio), side)
    steps = triples(coefficients, 5)
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        made, polar = matrix(rows, cols, spectrum, seed)
        exact = orthogonalise(made / torch.linalg.matrix_norm(made), steps, standard)
        for name, (dtype, form) in FORMS.items():
            x = normalised(made.float()[None], dtype)[0]
            out = orthogonalise(x, steps, form).double()
            errors = [
                (torch.linalg.matrix_norm(out - exact) / torch.linalg.matrix_norm(exact)).item(),
                (torch.linalg.matrix_norm(out - polar) / torch.linalg.matrix_norm(polar)).item(),
                torch.linalg.matrix_norm(out, 2).item() if out.isfinite().all() else math.inf,
            ]
            found[name] = [max(pair) for pair in zip(errors, found.get(name, errors), strict=True)]
    return found


def orthogonalise(x: Tensor, steps: tuple[Triple, ...], form: Form) -> Tensor:
    wide = x.mT if x.shape[0] > x.shape[1] else x
    out = form(wide[None], steps)[0]
    return out.mT if wide is not x else out


def main() -> None:
    parser = argparse.ArgumentParser(description="Rounding of Newton-Schulz.")
    parser.add_argument("--sides", type=int, nargs="+", default=[128, 256], help="shorter side")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "muon_accuracy.json"
    )
    options = parser.parse_args()
    started, rows = time.process_time(), []
    for coefficients in ("jordan", "polar_express"):
        for side in options.sides:
            for aspect in ASPECTS:
                for spectrum in SPECTRA:
                    cell = measure(side, aspect, spectrum, coefficients, options.seeds)
                    rows.append({"coefficients": coefficients, "side": side, "aspect": aspect,
                                 "spectrum": spectrum, "forms": cell})  # fmt: skip
        show(coefficients, [row for row in rows if row["coefficients"] == coefficients])
    report = {"machine": machine.describe(), "restarts": GRAM_RESTARTS, "seeds": options.seeds, "rows": rows}
    report["cpu_s"] = round(time.process_time() - started, 1)
    options.out.write_text(json.dumps(report) + "\n")
    print(f"written to {options.out}")


def show(coefficients: str, rows: list[dict[str, Any]]) -> None:
    """Worst rounding over all shapes but squares (no form but the standard one is used there) for every spectrum."""
    print(f"\n{coefficients}: worst rounding off squares; in brackets the largest singular value")
    print(f"{'':<32}" + "".join(f"{each:>17}" for each in SPECTRA))
    for name in FORMS:
        line = ""
        for spectrum in SPECTRA:
            cells = [r["forms"][name] for r in rows if r["spectrum"] == spectrum and r["aspect"] != "square"]
            line += f"{max(c[0] for c in cells):>10.1e} ({max(c[2] for c in cells):.2f})"
        print(f"{name:<32}{line}")


if __name__ == "__main__":
    main()
