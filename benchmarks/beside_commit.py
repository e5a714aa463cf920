"""Decoding and a training step of two trees of this project, in turns on one machine.

    git archive COMMIT | tar x -C OLD
    OMP_NUM_THREADS=1 python benchmarks/beside_commit.py OLD --commit COMMIT --out benchmarks/results/beside_commit.json

A process of each tree loads its models; then both measure case after case in turns, so that what else the machine does
meets both. Decoding is tokens a processor second, the prefill taken off; a step is processor seconds, of RL alone and
with a hinted turn in every rollout. The trees bring their own benchmarks, of which this one calls the common parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODELS = {"toy": "toy", "135M": "smollm2-135m"}
CASES = [(kind, model) for model in MODELS for kind in ("decode", "step", "hinted step")]
LOADS = {"toy": (16, 64, 64), "135M": (8, 64, 24)}
"""Rows, tokens of a prompt, tokens of a message."""
NEVER = 1 << 20
"""Steps between measurements of both gradients: every step shares one backward pass."""


def work() -> None:
    """Measure the cases that standard input names, with the tree that PYTHONPATH names."""
    import generation
    import packed_forward
    import targeted_step
    from targeted_step import FeedbackSettings, Policy, add_adapter

    make = getattr(packed_forward, "make_samples", None) or packed_forward.make_batch  # pyright: ignore
    settings: Any = getattr(targeted_step, "feedback_of", None) or FeedbackSettings
    engines: dict[str, Any] = {}
    for line in sys.stdin:
        kind, model = json.loads(line)
        if kind == "decode":
            if model not in engines:
                engines[model] = generation.Woodshed(MODELS[model], 0, Path(tempfile.mkdtemp()))
            print(json.dumps(decode(generation, engines[model], LOADS[model])), flush=True)
            continue
        options = argparse.Namespace(
            model="" if model == "toy" else MODELS[model],
            dtype="float32",
            lora_rank=8,
            prefix=256,
            targets=1,
            rollouts=4 if model == "toy" else 2,
            message=32,
            hint=16,
            micro_batch=2048,
            runs=8 if model == "toy" else 1,
        )
        whole = packed_forward.load(options.model, options.dtype)
        policy = Policy(add_adapter(whole.model, options.lora_rank), is_adapter=True)
        given = {"weight": 0.0} if kind == "step" else {"measure_every": NEVER}
        samples = make(options, policy.model.config.get_text_config().vocab_size)
        found = targeted_step.measured(policy, samples, settings(**given), options)
        print(json.dumps(found["mean_s"]), flush=True)


def decode(generation: Any, engine: Any, load: tuple[int, int, int]) -> float:
    """Tokens a processor second, the prefill taken off."""
    asked = generation.Load(*load)
    prompts, lengths = asked.prompts(engine.vocabulary), asked.lengths()
    seconds = []
    for sizes in (lengths, [[1] * asked.rows], lengths):  # the first one compiles and allocates
        engine.forget()
        began = time.process_time()
        generation.converse(engine, asked, prompts, sizes)
        seconds.append(time.process_time() - began)
    return asked.tokens() / (seconds[2] - seconds[1])


class Tree:
    """A process that measures one tree."""

    def __init__(self, root: Path) -> None:
        paths = os.pathsep.join(map(str, (root, root / "benchmarks")))
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--work"],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, case: tuple[str, str]) -> float:
        """One figure of a case."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line[0].isdigit():
                return float(line)
        raise RuntimeError("a tree ended without a figure")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Print the rows, and write them as JSON."""
    parser = argparse.ArgumentParser(description="Two trees of this project, in turns.")
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("--commit", default="", help="of the old tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work()
    trees = {"before": Tree(options.old.resolve()), "after": Tree(ROOT)}
    figures: dict[tuple[str, str], dict[str, list[float]]] = {}
    for number in range(options.rounds + 1):
        for case in CASES:
            for name in sorted(trees, reverse=bool(number % 2)):
                figure = trees[name].measure(case)
                if number:  # the first round loads and warms up
                    figures.setdefault(case, {}).setdefault(name, []).append(float(f"{figure:.4g}"))
    for tree in trees.values():
        tree.close()
    rows = [{"case": kind, "model": model, **figures[kind, model]} for kind, model in CASES]
    for row in rows:
        before, after = (statistics.median(row[name]) for name in ("before", "after"))
        print(f"{row['case']:12} {row['model']:6} {before:9.4g} {after:9.4g}  {after / before - 1:+.1%}")
    if options.out:
        from woodshed.runs import machine

        report = {"commit_before": options.commit, "rows": rows, "machine": machine.describe()}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
