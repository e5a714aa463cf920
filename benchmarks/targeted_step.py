"""What targeted feedback adds to a whole training step: RL alone against RL with hinted turns, through `update` itself.

    python benchmarks/targeted_step.py                                          toy size, for any machine
    python benchmarks/targeted_step.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --dtype bfloat16 \
        --lora-rank 16 --prefix 8192 --rollouts 8 --micro-batch 32768           the card's bar

Bar: at most 5% at one target in an 8k-token rollout. A step is everything from the packed batch to the new weights:
both losses, their backward passes, norms, clipping and AdamW. The hinted turn is each rollout's last, so its prefix
is as long as can be. Every way is measured, the settings' defaults as they are first. Seconds are least, median and
most of `--runs` steps after those that compile and allocate; of the defaults over whole rounds of
`FeedbackSettings.measure_every` steps, whose mean is what they cost. On a CPU they are processor seconds (set
OMP_NUM_THREADS=1), which other work on the machine does not enter. Beside them: positions that went forward without
and with a graph, and backward, in a step, in multiples of the rollouts' own: what a step must compute, whatever the
machine. Each row is written as it is measured, and not measured twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kept_rows import Rows, spread
from packed_forward import load, make_samples, synchronise

from woodshed.experience.samples import TrainingSample
from woodshed.learning import prefix_tree
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import Policy, add_adapter
from woodshed.learning.trainer import Trainer

ADDED = 0.05
ALONE = {"weight": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "RL alone": ALONE,
    "the settings' defaults": {},
    "the settings' defaults, one rollout in four hinted": {},
}
for _kind in ("ema", "frozen", "live"):
    CASES |= {
        f"{_kind}, separate": {"teacher": _kind, "forward": "separate"},
        f"{_kind}, packed, measured every step": {"teacher": _kind, "forward": "packed", "measure_every": 1},
        f"{_kind}, packed, between measurements": {
            "teacher": _kind,
            "forward": "packed",
            "measure_every": 1 << 20,
        },
    }
CASES["RL alone, again"] = ALONE

EXPECTED = {
    "RL alone, again": "-1 to 1%",
    "the settings' defaults": "41%: the teacher's own forward is a third, measuring an eighth of 65%",
    "the settings' defaults, one rollout in four hinted": "10 to 20%",
    "ema, separate": "126%",
    "ema, packed, measured every step": "98%",
    "ema, packed, between measurements": "33%",
    "live, packed, measured every step": "68%",
    "live, packed, between measurements": "1.5%",
}
"""What is added, written down before the run on the card; a frozen teacher costs what an averaged one does."""


def main() -> None:
    options = _options()
    policy = load(options.model, options.dtype)
    if options.lora_rank:
        policy = Policy(add_adapter(policy.model, options.lora_rank), is_adapter=True)
    samples = make_samples(options, policy.model.config.get_text_config().vocab_size)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "commit")}
    rows = Rows(options.out, settings, key=("what",), commit=options.commit)
    rows.report |= {"expected": EXPECTED, "bar": ADDED, "why_not_packed": prefix_tree.why_not(policy)}
    for what, given in CASES.items():
        feedback = feedback_of(**given)
        if rows.has(what=what) or (
            rows.report["why_not_packed"] and feedback.forward == "packed" and given != ALONE
        ):
            continue
        part = (
            [dataclasses.replace(s, branches=s.branches if n % 4 == 0 else ()) for n, s in enumerate(samples)]
            if "one rollout in four" in what
            else samples
        )
        found = measured(policy, part, feedback, options)
        alone = rows.rows[0]["mean_s"] if rows.rows else found["mean_s"]
        rows.add({"what": what, **found, "added": round(found["mean_s"] / alone - 1.0, 4)})
    if reason := rows.report["why_not_packed"]:
        print(f"nothing could be packed: {reason}")
    print(f"bar {100 * ADDED:g}%, one target in 8k tokens")


def feedback_of(measure_every: int = FeedbackSettings.measure_every, **given: Any) -> FeedbackSettings:
    """Settings of a case, with another number of steps between measurements than the constant."""

    class Measuring(FeedbackSettings):
        pass

    Measuring.measure_every = measure_every
    return Measuring(**given)


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
    parser.add_argument("--commit", default="", help="of this code, where it is no checkout")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "targeted_step.json")
    return parser.parse_args()


def measured(
    policy: Policy, samples: list[TrainingSample], feedback: FeedbackSettings, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds and positions of a step. Every case starts from the same weights."""
    start = policy.snapshot()
    trainer = Trainer(
        policy,
        OptimizerSettings(learning_rate=1e-6, warmup_steps=0),
        LossSettings(micro_batch_tokens=options.micro_batch),
        feedback,
        start=start,
        message_tokens=options.message,
    )
    clock = time.perf_counter if policy.device.type == "cuda" else time.process_time

    def act() -> float:
        synchronise(policy.device)
        started = clock()
        trainer.step(samples)
        synchronise(policy.device)
        return clock() - started

    runs, between = (
        options.runs,
        feedback.measure_every > 1 and feedback.weight > 0 and feedback.forward == "packed",
    )
    act()
    if between:
        act()  # the step that shares one backward pass compiles too
    if between and feedback.measure_every < 1 << 20:
        runs = feedback.measure_every * -(
            -runs // feedback.measure_every
        )  # whole rounds, each with one measurement
    if policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with counted(policy) as positions:
        seconds = [act() for _ in range(runs)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if policy.device.type == "cuda" else 0.0
    policy.load_weights(start)
    own = sum(len(sample.ids) for sample in samples) * runs
    return {
        "seconds": spread(seconds),
        "mean_s": float(f"{sum(seconds) / runs:.4g}"),
        "steps": runs,
        **{name: round(positions[name] / own, 3) for name in ("no_graph", "graph", "backward")},
        "peak_gib": round(peak, 2),
    }


@contextmanager
def counted(policy: Policy) -> Iterator[Counter[str]]:
    """Positions, padding included, that leave the first layer with and without a graph, and come back as gradients."""
    seen: Counter[str] = Counter()

    def backward(gradient: torch.Tensor) -> None:
        seen["backward"] += gradient.shape[0] * gradient.shape[1]

    def look(_module: Any, _inputs: Any, output: Any) -> None:
        hidden_BTD = output[0] if isinstance(output, tuple) else output
        count = hidden_BTD.shape[0] * hidden_BTD.shape[1]
        if hidden_BTD.requires_grad:
            seen["graph"] += count
            hidden_BTD.register_hook(backward)
        else:
            seen["no_graph"] += count

    layers = next(
        module for _, module in policy.model.named_modules() if isinstance(module, torch.nn.ModuleList)
    )
    hook = layers[0].register_forward_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


if __name__ == "__main__":
    main()
