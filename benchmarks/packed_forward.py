"""What targeted feedback costs beside the policy gradient: hinted turns as branches against separate forwards.

    python benchmarks/packed_forward.py                                         toy size, for any machine
    python benchmarks/packed_forward.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --dtype bfloat16 \
        --prefix 16384 --targets 4 --micro-batch 32768                          the card's bar
    python benchmarks/packed_forward.py --model ... --prefix 8192 --targets 1 --rollouts 4

Bars: the hinted turns' teacher at least 5 times cheaper packed than as separate prefills (16k prefix, 4 targets); at
most 5% added to a training step by one target in an 8k rollout, live teacher, one backward pass; the same log-probs to
1e-4 in float32. Times are medians after a warm-up call, the device synchronised.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from woodshed.engines import local
from woodshed.engines.local import invariant
from woodshed.experience.samples import HintBranch, TrainingSample, teacher_view
from woodshed.learning import packing, prefix_tree, trainer
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.policy import Policy
from woodshed.learning.step_inputs import StepInputs
from woodshed.learning.teacher import Teacher
from woodshed.records import Hint
from woodshed.runs import machine

CHEAPER, ADDED = 5.0, 0.05


def main() -> None:
    options = _options()
    policy = load(options.model, options.dtype)
    reason = prefix_tree.why_not(policy)
    if reason:
        raise SystemExit(f"this model cannot take branches: {reason}")
    samples = make_samples(options, policy.model.config.get_text_config().vocab_size)
    rows = measure(policy, samples, options)
    gap = largest_gap(policy, samples)
    by_name = {row["what"]: row["seconds"] for row in rows}
    alone, separate = by_name["rollouts alone"], by_name["teacher, a prefill each"]
    print(f"{'':<44}{'seconds':>10}{'over alone':>12}")
    for row in rows:
        row["added"] = row["seconds"] / alone - 1.0
        is_step = not row["what"].startswith("teacher")
        print(
            f"{row['what']:<44}{row['seconds']:>10.4f}" + (f"{100 * row['added']:>11.1f}%" if is_step else "")
        )
    cheaper = separate / by_name["teacher, packed"]
    joint = by_name["with targets, packed, live, one backward"] / alone - 1.0
    print(
        f"the packed teacher is {cheaper:.1f} times cheaper (bar {CHEAPER:g}, at 16k prefixes and 4 targets)"
    )
    print(f"one backward adds {100 * joint:.1f}% (bar {100 * ADDED:g}%, at one target in 8k)")
    print(
        f"largest difference in log-probs {gap:.2g} (bar 1e-4 in float32); peak memory {peak_gib(policy):.2f} GiB"
    )
    keep(options, {"rows": rows, "cheaper": cheaper, "log_prob_gap": gap, "peak_gib": peak_gib(policy)})


def keep(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what was found, with the settings and the machine, to `--out`."""
    report = {
        **found,
        "settings": {name: str(value) for name, value in vars(options).items() if name != "out"},
        "load": os.getloadavg()[0],
        "machine": machine.describe(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hinted turns as branches against separate forwards.")
    parser.add_argument(
        "--model", default="", help="model directory or hub id; empty: a random Llama of toy size"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--prefix", type=int, default=1024, help="tokens of a rollout before its hinted turns"
    )
    parser.add_argument("--targets", type=int, default=4, help="hinted turns of each rollout")
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--message", type=int, default=48, help="tokens of a hinted turn")
    parser.add_argument("--hint", type=int, default=32, help="tokens of a hint")
    parser.add_argument("--micro-batch", type=int, default=32768, help="positions in one forward-backward")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "packed_forward.json")
    return parser.parse_args()


def load(name: str, dtype: str) -> Policy:
    if name:
        model = local.load(name, dtype=dtype).model
    else:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=1 << 17,
        )
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
        invariant.install(model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.nn.Module.to(model, device)
    return Policy(model, is_adapter=False)


def make_samples(options: argparse.Namespace, vocabulary: int) -> list[TrainingSample]:
    """Rollouts of random tokens whose last `targets` messages are hinted; a tenth of the rest is the policy's too."""
    rng = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=rng).tolist())

    samples = []
    for number in range(options.rollouts):
        ids, opening, branches = draw(options.prefix), 3, []
        predicted = list(range(options.prefix - options.prefix // 10, options.prefix))
        for turn in range(options.targets):
            shared = len(ids)
            own = draw(opening + options.message)
            branch = draw(options.hint) + own
            ids += own
            message = tuple(range(len(ids) - options.message, len(ids)))
            predicted += message
            hint = Hint(str(number), turn, "", "x")
            spans = ((turn, options.message),)
            branches.append(HintBranch(hint, shared, branch, message, (1.0,) * len(message), spans))
        streams = [(value,) * len(predicted) for value in (-1.0, 0.5 - number % 2, 1.0)]
        logps, advantages, weights = streams
        samples.append(
            TrainingSample(
                ids,
                tuple(predicted),
                logps,
                advantages=advantages,
                rl_weights=weights,
                branches=tuple(branches),
                rollout_id=str(number),
            )
        )
    return samples


def measure(
    policy: Policy, samples: list[TrainingSample], options: argparse.Namespace
) -> list[dict[str, Any]]:
    objective = LossSettings(micro_batch_tokens=options.micro_batch)

    def work(kind: str, hinted: bool = True) -> StepInputs:
        feedback = FeedbackSettings.model_validate({"teacher": kind, "weight": float(hinted)})
        return StepInputs(
            policy, Teacher(policy, start, feedback), samples, objective, feedback, 1.0, options.message
        )

    start = policy.snapshot()
    with_branches = prefix_tree.pad(prefix_tree.prefixes(samples), policy.device)

    def prefills() -> None:
        with torch.no_grad():
            for each in prefix_tree.hinted_turns(samples):
                policy.logits(packing.pad([teacher_view(*each)], policy.device))

    def packed_prefill() -> None:
        with torch.no_grad():
            policy.logits(with_branches.padded)

    cases: dict[str, Callable[[], object]] = {
        "rollouts alone": lambda: trainer.separate(work("frozen", hinted=False)),
        "with targets, separate": lambda: trainer.separate(work("frozen")),
        "with targets, packed, frozen": lambda: trainer.branching(work("frozen")),
        "with targets, packed, live": lambda: trainer.branching(work("live")),
        "with targets, packed, live, one backward": lambda: trainer.branching_joint(work("live"), 0.1),
        "teacher, a prefill each": prefills,
        "teacher, packed": packed_prefill,
    }
    return [{"what": what, "seconds": timed(act, options.runs, policy.device)} for what, act in cases.items()]


def timed(act: Callable[[], object], runs: int, device: torch.device) -> float:
    """Seconds: the median of some runs after one that compiles and allocates."""
    act()
    times = []
    for _ in range(runs):
        synchronise(device)
        started = time.perf_counter()
        act()
        synchronise(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def largest_gap(policy: Policy, samples: list[TrainingSample]) -> float:
    """Largest difference in the hinted tokens' log-probs, packed against separate."""
    both = prefix_tree.pad(prefix_tree.prefixes(samples), policy.device)
    packed = policy.logits(both.padded).float().log_softmax(-1).flatten(0, 1)[both.teacher_GN]
    apart = [
        policy.logits(packing.pad([teacher_view(*each)], policy.device)).float().log_softmax(-1)[0]
        for each in prefix_tree.hinted_turns(samples)
    ]
    return max(float((a - b).abs().max()) for a, b in zip(packed, apart, strict=True))


def peak_gib(policy: Policy) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if policy.device.type == "cuda" else 0.0


if __name__ == "__main__":
    main()
