"""What targeted feedback adds to a whole training step: RL alone against RL with hinted turns, through `update` itself.

    python benchmarks/targeted_step.py                                          toy size, for any machine
    python benchmarks/targeted_step.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --dtype bfloat16 \
        --lora-rank 16 --prefix 8192 --rollouts 16 --micro-batch 32768          the card's bar

Bar: at most 5% at one target in an 8k-token rollout. A step is everything from the packed batch to the new weights:
both losses, their backward passes, norms, clipping and AdamW. Seconds are means over `--runs` steps after one that
compiles and allocates; on a CPU they are processor seconds (set OMP_NUM_THREADS=1), which other work on the machine
does not enter. What `feedback.measure_every = 8` and 32 add follows from a step that measures both norms and one that
does not.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from packed_forward import keep, load, make_batch, peak_gib, synchronise

from woodshed.training import branches
from woodshed.training.objective import FeedbackSettings, ObjectiveSettings
from woodshed.training.packing import Batch
from woodshed.training.policy import Policy, add_adapter
from woodshed.training.teacher import Teacher
from woodshed.training.update import GradientScale, OptimizerSettings, make_optimizer, update

ADDED = 0.05
CASES: dict[str, dict[str, Any]] = {
    "RL alone": {"weight": 0.0},
    "frozen, separate": {"teacher": "frozen"},
    "frozen, packed": {"forward": "packed", "teacher": "frozen"},
    "live, packed": {"forward": "packed", "teacher": "live"},
    "frozen, packed, between measurements": {
        "forward": "packed",
        "teacher": "frozen",
        "measure_every": 1 << 20,
    },
    "live, packed, between measurements": {"forward": "packed", "teacher": "live", "measure_every": 1 << 20},
}
EVERY = (8, 32)


def main() -> None:
    options = _options()
    policy = load(options.model, options.dtype)
    if options.lora_rank:
        policy = Policy(add_adapter(policy.model, options.lora_rank), is_adapter=True)
    batch = make_batch(options, policy.model.config.get_text_config().vocab_size)
    why_not = branches.why_not(policy)
    can_branch = not why_not
    title = f"{options.rollouts} rollouts of {options.prefix} tokens, {options.targets} hinted turns each"
    print(f"{title:<52}{'seconds':>10}{'added':>9}")
    rows: list[dict[str, Any]] = []
    for what, given in CASES.items():
        if can_branch or given.get("forward") != "packed":
            seconds = step_seconds(policy, batch, FeedbackSettings.model_validate(given), options)
            alone = rows[0]["seconds"] if rows else seconds
            rows.append({"what": what, "seconds": seconds, "added": seconds / alone - 1.0})
            print(f"{what:<52}{seconds:>10.4f}{100 * rows[-1]['added']:>8.1f}%", flush=True)
            keep(options, {"rows": rows, "peak_gib": peak_gib(policy)})
    added = {row["what"]: row["added"] for row in rows}
    for kind in ("frozen", "live") if can_branch else ():
        measured, between = added[f"{kind}, packed"], added[f"{kind}, packed, between measurements"]
        for every in EVERY:
            share = between + (measured - between) / every
            rows.append({"what": f"{kind}, packed, measured every {every} steps", "added": share})
            print(f"{rows[-1]['what']:<52}{'':>10}{100 * share:>8.1f}%")
    keep(options, {"rows": rows, "peak_gib": peak_gib(policy)})
    print(f"bar {100 * ADDED:g}%, one target in 8k tokens, the student's side shared")
    if why_not:
        sys.exit(f"nothing could be packed: {why_not}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What targeted feedback adds to a training step.")
    parser.add_argument(
        "--model", default="", help="model directory or hub id; empty: a random Llama of toy size"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora-rank", type=int, default=8, help="0 trains all weights")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens of a rollout before its hinted turn")
    parser.add_argument("--targets", type=int, default=1, help="hinted turns of each rollout")
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--message", type=int, default=48, help="tokens of a hinted turn")
    parser.add_argument("--hint", type=int, default=32, help="tokens of a hint")
    parser.add_argument("--micro-batch", type=int, default=32768, help="positions in one forward-backward")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "targeted_step.json")
    return parser.parse_args()


def step_seconds(
    policy: Policy, batch: Batch, feedback: FeedbackSettings, options: argparse.Namespace
) -> float:
    """Mean seconds of a step. Every case starts from the same weights."""
    start = policy.snapshot()
    optimizer = make_optimizer(policy, OptimizerSettings(learning_rate=1e-6))
    teacher, scale = Teacher(policy, start, feedback), GradientScale()

    def act() -> None:
        update(
            policy,
            optimizer,
            batch,
            scale=scale,
            teacher=teacher,
            learning_rate=1e-6,
            message_tokens=options.message,
            temperature=1.0,
            objective=ObjectiveSettings(micro_batch_tokens=options.micro_batch),
            feedback=feedback,
            max_grad_norm=1.0,
        )

    act()
    if feedback.measure_every > 1:
        act()  # the step that shares one backward pass compiles too
        scale.unmeasured = 0
    synchronise(policy.device)
    clock = time.perf_counter if policy.device.type == "cuda" else time.process_time
    started = clock()
    for _ in range(options.runs):
        act()
    synchronise(policy.device)
    seconds = (clock() - started) / options.runs
    policy.load_weights(start)
    return seconds


if __name__ == "__main__":
    main()
