"""What the runs of recipes/targeted-feedback.toml did, step by step, as one small file to commit.

    python benchmarks/feedback_summary.py runs/targeted-feedback-{rl,kl-ema}-? --machine "1 NVIDIA H200" --out FILE

What FILE already holds stays, but for the same runs of the same machine.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from woodshed import settings
from woodshed.evals import variants
from woodshed.records import Hint
from woodshed.runs.folder import RunDir
from woodshed.stages.recipe import Recipe


def summary(run: RunDir) -> dict[str, Any]:
    recipe = settings.read(Recipe, run.path / "recipe.toml")
    found = run.read("metrics")
    steps = [metrics for phase, _, metrics in found if phase == "train"]
    faults = Counter(
        hint.detector
        for phase, step, hint in run.read("hints", Hint)
        if phase == "train" and step >= len(steps) - 3
    )
    return {
        "run": run.path.name,
        "seed": recipe.seed,
        "adapter": recipe.policy.adapter,
        "stopped": variants.stopped(run),
        "steps": [_step(metrics) for metrics in steps],
        "evaluations": [
            {"step": step} | _evaluation(metrics) for phase, step, metrics in found if phase == "eval"
        ],
        "faults_in_last_3_steps": dict(faults.most_common()),
    }


def _step(metrics: dict[str, Any]) -> dict[str, Any]:
    shares = ("invalid_calls", "reward", "solved", "untested")
    rest = {
        "turns": metrics["invalid_calls"]["whole"],
        "kl_to_start": metrics.get("kl_to_start"),
        "logp_gap": metrics.get("logp_gap_mean"),
        "logp_gap_max": metrics.get("logp_gap_max"),
        "stuck": metrics.get("stuck_tokens"),
        "targets": metrics.get("targets"),
        "factor": metrics.get("kl_factor"),
        "seconds": sum(metrics["seconds"].values()),
    }
    figures = {name: metrics[name]["value"] for name in shares} | rest
    return {name: _rounded(value) for name, value in figures.items()}


def _evaluation(metrics: dict[str, Any]) -> dict[str, Any]:
    shares = ("invalid_calls", "faulty_rollouts", "untested", "solved", "reward")
    kept = ("value", "low", "high", "part", "whole")
    return {name: {key: _rounded(metrics[name][key]) for key in kept} for name in shares}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    file = json.loads(args.out.read_text()) if args.out.exists() else {"runs": []}
    new = [summary(RunDir.open(path)) | {"machine": args.machine} for path in args.runs]
    made = {(run["run"], run["machine"]) for run in new}
    others = [run for run in file["runs"] if (run["run"], run["machine"]) not in made]
    args.out.write_text(json.dumps(file | {"runs": others + new}, indent=1) + "\n")
    for run in new:
        rates = [f"{100 * (step['invalid_calls'] or 0):.0f}" for step in run["steps"]]
        print(f"{run['run']}: invalid calls {' '.join(rates)} %")


if __name__ == "__main__":
    main()
