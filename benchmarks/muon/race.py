"""Are 200 steps with random delays between transfers and products bit for bit those without? And does memory keep to
the plan?

    torchrun --nproc-per-node 4 benchmarks/muon/race.py [--case "small cut"] [--steps 200]

Delays are put before and after every all-to-all: on the stream (GPU) or in the process (CPU), different on every rank.
A read before its transfer ended, or a buffer reused too early, would change bits.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import cases
import contenders
import torch
import torch.distributed as dist
from cases import CASES

from woodshed.muon import ShardedMuon
from woodshed.muon.layout import local


def main() -> None:
    parser = argparse.ArgumentParser(description="Random delays must not change a bit.")
    parser.add_argument("--case", choices=CASES, default=None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--inflight-mb", type=float, default=None, help="small enough for many buckets")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "muon_race.json")
    options = parser.parse_args()
    device = cases.start()
    large = device.type == "cuda"
    name = options.case or ("small cut" if large else "toy cut")
    inflight_bytes = int((options.inflight_mb or (512 if large else 0.1)) * (1 << 20))
    straight = final(name, device, options.steps, inflight_bytes, delayed=False)
    delayed = final(name, device, options.steps, inflight_bytes, delayed=True)
    same = torch.tensor(float(straight["digest"] == delayed["digest"]), device=device)
    dist.all_reduce(same, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        report = {"hardware": cases.describe(device), "case": name, "steps": options.steps}
        report |= {
            "bitwise": bool(same.item()),
            "peak_mb": straight["peak_mb"],
            "plan_mb": straight["plan_mb"],
            "buckets": straight["buckets"],
        }
        print(json.dumps(report, indent=2))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    dist.destroy_process_group()
    if not same.item():
        raise SystemExit("delays changed the result: a race")


def final(name: str, device: torch.device, steps: int, inflight_bytes: int, delayed: bool) -> dict[str, Any]:
    """Weights after `steps` as sums of their bits, and the peak of memory beside what the plan foresees."""
    model = cases.make(CASES[name], device)
    optimizer = contenders.ours(model, lr=1e-3, max_inflight_bytes=inflight_bytes)
    if delayed:
        for runner in {task.runner for task in optimizer._tasks}:
            delay(runner, device)
    optimizer.step()
    cases.synchronise(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps - 1):
        optimizer.step()
    cases.synchronise(device)
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    digest = [
        int(local(p.detach()).contiguous().view(torch.int32).sum(dtype=torch.int64))
        for p in model.held.values()
    ]
    return {
        "digest": digest,
        "peak_mb": round(peak / (1 << 20), 1),
        "plan_mb": round(foreseen(optimizer, inflight_bytes) / (1 << 20), 1),
        "buckets": len(optimizer._tasks),
    }


def foreseen(optimizer: ShardedMuon, inflight_bytes: int) -> float:
    """As many buckets as the budget starts, and the products' temporaries for the largest batch."""
    buckets = [task.bucket.scratch_bytes for task in optimizer._tasks]
    largest = max(buckets)
    inflight = max(largest, min(sum(buckets), inflight_bytes // largest * largest))
    solve = optimizer.settings.newton_schulz
    temporaries = max(
        min(len(batch.slots), max(1, inflight_bytes // 2 // solve.scratch_bytes(batch.rows, batch.cols)))
        * solve.scratch_bytes(batch.rows, batch.cols)
        for task in optimizer._tasks
        for batch in task.batches
    )
    return inflight + temporaries


def delay(runner: Any, device: torch.device) -> None:
    transfer, rng = runner.transfer, random.Random(dist.get_rank())

    def slow(*args: Any) -> Any:
        pause(rng, device)
        work = transfer(*args)
        pause(rng, device)
        return work

    runner.transfer = slow


def pause(rng: random.Random, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(rng.randrange(1, 2_000_000))  # cycles: up to a millisecond
    else:
        time.sleep(rng.random() / 1000)


if __name__ == "__main__":
    main()
