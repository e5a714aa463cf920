"""Decoding and training of this tree beside an earlier one, in turns, on one machine.

    git archive REVISION woodshed benchmarks tests | tar -x -C /tmp/earlier
    python benchmarks/beside_revision.py --earlier /tmp/earlier                          toy size, for any machine
    python benchmarks/beside_revision.py --earlier /tmp/earlier --model 0.5b --dtype bfloat16 --prompts 16 --group 8 \
        --prompt-tokens 512 --new 256 --steps 6 --micro-rows 16 --adapters 0,16 --loads 128,16,agent     the card's

Each tree runs its own `generation.py` (tokens a second of decoding, of the whole call for the agent's load) and the
Woodshed side of its own `grpo_side_by_side.py` (generation, loss, backward, AdamW on an adapter of rank 16), `--rounds`
times, the two trees in alternation. Ratios are this tree over the earlier one, medians over the rounds; above 1 is
faster. Expected: 0.95 to 1.05 for decoding without an adapter, 1.0 to 1.1 for a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kept_rows import Rows
from vllm_engine import SHAPES, write_shape

HERE = Path(__file__).parent


def main() -> None:
    options = _options()
    settings = {
        name: value for name, value in vars(options).items() if name not in ("out", "earlier", "commit")
    }
    rows = Rows(options.out, settings, key=("round", "tree"), commit=options.commit)
    with tempfile.TemporaryDirectory() as scratch:
        model = (
            write_model(options.model, Path(scratch) / "model") if options.model in SHAPES else options.model
        )
        for round_number in range(options.rounds):
            for tree, folder in (("earlier", options.earlier), ("this", HERE.parent)):
                if not rows.has(round=round_number, tree=tree):
                    row = {"round": round_number, "tree": tree}
                    row |= {"decoding": decoding(folder, options, Path(scratch))}
                    row |= {"step": training(folder, model, options, Path(scratch))}
                    rows.add(row)
                    rows.write(ratios=ratios(rows.rows))
    for name, ratio in ratios(rows.rows).items():
        print(f"{name:<32}{ratio:>8.3f}")


def write_model(shape: str, folder: Path) -> str:
    """Random weights of a shape, with the byte-level tokenizer of the tests."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sys.path.append(str(HERE.parent / "tests"))
    from tiny_model import tiny_tokenizer  # pyright: ignore[reportMissingImports]

    write_shape(folder, shape)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def decoding(tree: Path, options: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Median tokens a second, by load and adapter rank."""
    words = ["--models", options.model, "--adapters", options.adapters, "--loads", options.loads]
    report = _report(tree, "generation.py", [*words, "--sides", "woodshed"], scratch)
    return {
        f"{row['load']} rows, adapter {row['lora_rank']}": row.get(
            "decode_tokens_per_s", row["whole_tokens_per_s"]
        )[1]
        for row in report["rows"]
    }


def training(tree: Path, model: str, options: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Median seconds of a step and of its generation, and the peak of memory in GiB."""
    names = ("dtype", "prompts", "group", "prompt_tokens", "new", "steps")
    words = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    words += ["--model", model, "--sides", f"woodshed:{options.micro_rows}"]
    row = _report(tree, "grpo_side_by_side.py", words, scratch)["rows"][0]
    return {
        "step_s": row["step_s"][1],
        "generating_s": row["generating_s"][1],
        "peak_gib": row["peak_gib"],
    }


def _report(tree: Path, script: str, words: list[str], scratch: Path) -> dict[str, Any]:
    """The JSON that a benchmark of a tree writes."""
    out = scratch / f"{script}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(tree / "benchmarks" / script), *words, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode or not out.exists():
        raise SystemExit(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-3000:]}")
    return json.loads(out.read_text())


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """This tree's medians over the earlier tree's; of seconds the inverse, so that above 1 is faster."""

    def median(tree: str, kind: str, name: str) -> float:
        return statistics.median(row[kind][name] for row in rows if row["tree"] == tree)

    if {row["tree"] for row in rows} != {"earlier", "this"}:
        return {}
    loads = rows[0]["decoding"]
    found = {
        f"decoding, {load}": median("this", "decoding", load) / median("earlier", "decoding", load)
        for load in loads
    }
    for name in ("step_s", "generating_s"):
        found[name.removesuffix("_s")] = median("earlier", "step", name) / median("this", "step", name)
    found["peak memory"] = median("this", "step", "peak_gib") / median("earlier", "step", "peak_gib")
    return {name: round(ratio, 3) for name, ratio in found.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="This tree beside an earlier one.")
    parser.add_argument("--earlier", type=Path, required=True, help="the other tree")
    parser.add_argument("--model", default="toy", help="a shape of generation.py, or a model folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--adapters", default="0")
    parser.add_argument("--loads", default="16")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro-rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "beside_revision.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
