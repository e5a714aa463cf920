"""How fast one step of sharded Muon is: against ceilings measured in the same run, and against others at equal math.

    torchrun --nproc-per-node 4 benchmarks/muon/step.py --dion DIR --torchtitan DIR/torchtitan/distributed
    python benchmarks/muon/step.py --cases "toy whole" "toy cut" --steps 3 --warmup 1          # any machine

Bars: floor / measured at least 0.85 on one card and 0.80 on several for the expert cases; 1.3 x dion, 1.2 x torchtitan,
3 x torch.optim.Muon over DTensors; scratch at most 2 x bytes in flight; exposed communication at most 15% of the
transfers' own time. Contenders take turns step by step in one set of processes; a figure is the median over steps of
the slowest rank. The JSON's `machine` feeds `python -m woodshed.muon.sim --machine`.

Expected on two cards, written before the first run in which shards moved: `kimi cut` 105 ms of products and 10 ms of
transfers, of which 1.5 ms are exposed; efficiency 0.88; dion 1.0 times as fast, as it overlaps alike; torchtitan 0.9.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import contenders
import torch
import torch.distributed as dist
from cases import CASES, Model

from woodshed.muon import NewtonSchulz, ShardedMuon
from woodshed.muon.cost import ELEMENTWISE_BYTES, Machine
from woodshed.muon.layout import local
from woodshed.muon.units import flops

GPU_CASES = ["kimi whole", "kimi cut", "small whole", "small cut", "small uneven", "dense"]
BARS = {"dion": 1.3, "torchtitan": 1.2, "torch": 3.0}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of sharded Muon.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=None)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--inflight-mb", type=int, default=1024)
    parser.add_argument("--dion", type=Path, help="folder that contains dion/")
    parser.add_argument("--torchtitan", type=Path, help="folder that contains flex_shard/")
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out: torch, gather, ...")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "muon_step.json")
    options = parser.parse_args()
    device = cases.start()
    chosen = options.cases or (GPU_CASES if device.type == "cuda" else ["toy whole", "toy cut", "toy dense"])
    rows: list[dict[str, Any]] = []
    say("all ranks are there")
    for name in chosen:
        rows.append(measure(name, device, options))
        if dist.get_rank() == 0:
            report = {"hardware": cases.describe(device), "machine": machine(rows, device), "rows": rows}
            report |= {"steps": options.steps, "warmup": options.warmup, "inflight_mb": options.inflight_mb}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=2) + "\n")
    dist.destroy_process_group()


def measure(name: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Ceilings, contenders in turn, then what is ours alone: ablations, exposed communication, memory."""
    model = cases.make(CASES[name], device)
    optimizer = contenders.ours(model, max_inflight_bytes=options.inflight_mb << 20)
    ceiling = ceilings(model, optimizer, device)
    say(f"{name}: floor {ceiling['floor_ms']:.2f} ms")
    steps: dict[str, Callable[[], Any]] = {"ours": optimizer.step}
    refused: dict[str, str] = {}
    for other, make in (
        ("gather", contenders.full_gather),
        ("torch", contenders.torch_muon),
        ("dion", lambda m: contenders.dion(m, options.dion)),
        ("dion, its Triton", lambda m: contenders.dion(m, options.dion, triton=True)),
        ("torchtitan", lambda m: contenders.torchtitan(m, options.torchtitan)),
    ):
        folder = other.split(",")[0]
        runs_here = device.type == "cuda" or "Triton" not in other
        if runs_here and other not in options.skip and getattr(options, folder, True) is not None:
            try:
                steps[other] = make(model)
                steps[other]()
                say(f"{name}: {other} has made a step")
            except Exception as error:  # another's refusal is a finding, on all ranks alike
                steps.pop(other, None)
                refused[other] = f"{type(error).__name__}: {error}"[:400]
    ms = interleaved(steps, device, options)
    say(f"{name}: {ms}")
    row = {"case": name, "layers": model.layers, "ms": ms, "ceilings": ceiling, "refused": refused}
    row["efficiency"] = round(ceiling["floor_ms"] / ms["ours"], 3)
    row["speedup"] = {other: round(ms[other] / ms["ours"], 2) for other in ms if other != "ours"}
    row |= memory(optimizer, device, options) | exposed(optimizer, device, options)
    row["plan"] = optimizer.plan.describe().splitlines()
    if device.type == "cuda":
        row["profile"] = {other: profile(step, device) for other, step in steps.items() if other != "gather"}
    del steps, optimizer
    row["ablations_ms"] = ablations(model, device, options)
    show(row, device)
    release(device)
    return row


def say(text: str) -> None:
    """A word of how far it has come: contenders compile for minutes."""
    if dist.get_rank() == 0:
        print(f"{time.process_time():7.1f} CPU s  {text}", flush=True)


def profile(step: Callable[[], Any], device: torch.device, most: int = 12) -> dict[str, Any]:
    """One step as the profiler sees it: milliseconds that the card worked, and by kernel, longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        step()
        cases.synchronise(device)
    kernels: dict[str, list[float]] = {}
    for event in found.events() or []:
        if event.device_type.name == "CUDA" and not event.name.startswith("Optimizer.step"):
            kernels.setdefault(event.name[:60], []).append(event.device_time_total / 1e3)
    longest = sorted(kernels.items(), key=lambda each: -sum(each[1]))
    return {
        "busy_ms": round(sum(sum(times) for times in kernels.values()), 2),
        "kernels": [f"{sum(times):8.2f} ms {len(times):5} x {name}" for name, times in longest[:most]],
    }


def ablations(model: Model, device: torch.device, options: argparse.Namespace) -> dict[str, float]:
    """One setting changed at a time."""
    variants: dict[str, dict[str, Any]] = {
        "defaults (auto backend)": {"newton_schulz": NewtonSchulz()},
        "gram": {"newton_schulz": NewtonSchulz(backend="gram")},
        "gradients unchecked": {"nonfinite": "unchecked"},
        "float32 wire": {"wire_dtype": torch.float32},
        "all_to_all": {"placement": "all_to_all"},
        "a third in flight": {"max_inflight_bytes": (options.inflight_mb << 20) // 3},
    }
    if device.type == "cuda":
        variants["half of every symmetric product"] = {"newton_schulz": NewtonSchulz(backend="symmetric")}
    found = {}
    for name, settings in variants.items():
        optimizer = contenders.ours(model, **{"max_inflight_bytes": options.inflight_mb << 20, **settings})
        found |= interleaved({name: optimizer.step}, device, options)
        del optimizer
        release(device)
    return found


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def interleaved(
    steps: dict[str, Callable[[], Any]], device: torch.device, options: argparse.Namespace
) -> dict[str, float]:
    """Median milliseconds of the slowest rank, contenders in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(options.warmup + options.steps):
        for name, step in steps.items():
            taken = slowest(timed(step, device), device)
            if round_ >= options.warmup:
                times[name].append(taken)
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def timed(act: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds, from when all ranks are ready until this one is done."""
    cases.synchronise(device)
    dist.barrier()
    return alone(act, device)


def alone(act: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of this rank, which waits for no other: they may have more, or other, work."""
    cases.synchronise(device)
    started = time.perf_counter()
    act()
    cases.synchronise(device)
    return 1e3 * (time.perf_counter() - started)


def slowest(ms: float, device: torch.device) -> float:
    worst = torch.tensor(ms, device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


# Ceilings ---------------------------------------------------------------------------------------------------------


def ceilings(model: Model, optimizer: ShardedMuon, device: torch.device) -> dict[str, float]:
    """What products, transfers and passes of this plan take at the speed that this machine reaches on each alone."""
    rank, large = dist.get_rank(), device.type == "cuda"
    shapes: dict[tuple[int, int], int] = {}
    for exchange in optimizer.plan.exchanges:
        for index in exchange.owned_by[exchange.members(rank).index(rank)]:
            unit = exchange.units[index]
            shapes[unit.rows, unit.cols] = shapes.get((unit.rows, unit.cols), 0) + 1
    products_ms, work = 0.0, 0.0
    for (rows, cols), count in shapes.items():
        products_ms += count * products(rows, cols, count, device)
        work += count * flops(rows, cols)
    products_ms = slowest(products_ms, device)
    sent = optimizer.plan.sent_bytes(rank)
    link = all_to_all_rate(256 << 20 if large else 1 << 18, device)
    memory_rate = copy_rate(1 << 30 if large else 1 << 22, device)
    elements = sum(local(p.detach()).numel() for p in model.held.values())
    transfers_ms = slowest(1e3 * sent / link, device) if sent else 0.0
    passes_ms = 1e3 * elements * ELEMENTWISE_BYTES / memory_rate
    return {
        "products_ms": products_ms,
        "transfers_ms": transfers_ms,
        "elementwise_ms": passes_ms,
        "floor_ms": max(products_ms, transfers_ms) + passes_ms,
        "product_flops": work / (products_ms / 1e3) if products_ms else 0.0,
        "link_bytes_per_s": link,
        "memory_bytes_per_s": memory_rate,
        "gram_factor": factor("gram", shapes, device),
        "symmetric_factor": factor("symmetric", shapes, device) if large else 1.0,
    }


def best(
    act: Callable[[], Any],
    device: torch.device,
    clock: Callable[[Callable[[], Any], torch.device], float],
    repeats: int = 5,
) -> float:
    act()
    return min(clock(act, device) for _ in range(repeats))


def products(rows: int, cols: int, count: int, device: torch.device) -> float:
    """Milliseconds for the products of one unit, the best over batch sizes. As many units in a row as a step has: a
    card that is busy for longer clocks lower."""
    m, n = sorted((rows, cols))
    sizes = {min(count, size) for size in (4, 8, 16, 64)}
    if rows * cols > 1 << 26:
        sizes = {1}
    found = []
    for size in sizes:
        x = torch.randn(size, m, n, device=device, dtype=torch.bfloat16) / n**0.5
        rounds = -(-count // size)

        def run(x: torch.Tensor = x, rounds: int = rounds) -> None:
            for _ in range(5 * rounds):
                gram = torch.bmm(x, x.mT)
                inner = torch.baddbmm(gram, gram, gram)
                torch.baddbmm(x, inner, x)

        found.append(best(run, device, alone) / (size * rounds))
    return min(found)


def factor(backend: Any, shapes: dict[tuple[int, int], int], device: torch.device) -> float:
    """Time of another form of Newton-Schulz over that of the standard one, for the shape with most work."""
    if not shapes:
        return 1.0
    rows, cols = max(shapes, key=lambda each: shapes[each] * flops(*each))
    x = torch.randn(min(8, shapes[rows, cols]), rows, cols, device=device, dtype=torch.bfloat16)
    standard = best(lambda: NewtonSchulz(backend="standard")(x), device, alone)
    return best(lambda: NewtonSchulz(backend=backend)(x), device, alone) / standard


def all_to_all_rate(size_bytes: int, device: torch.device) -> float:
    """Bytes that a rank sends to others per second in one large all-to-all; 0 for one rank."""
    world = dist.get_world_size()
    if world == 1:
        return 0.0
    out = torch.zeros(size_bytes // 2 // world * world, dtype=torch.bfloat16, device=device)
    into = torch.empty_like(out)
    ms = slowest(best(lambda: dist.all_to_all_single(into, out), device, timed), device)
    return 2 * out.numel() * (world - 1) / world / (ms / 1e3)


def copy_rate(size_bytes: int, device: torch.device) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.zeros(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / (slowest(best(lambda: target.copy_(source), device, timed), device) / 1e3)


# Ours alone -------------------------------------------------------------------------------------------------------


def memory(optimizer: ShardedMuon, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Peak beyond what is held between steps, and the budget that bounds it."""
    if device.type != "cuda":
        return {}
    release(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    optimizer.step()
    cases.synchronise(device)
    peak = (torch.cuda.max_memory_allocated(device) - before) / (1 << 20)
    return {"scratch_mb": round(slowest(peak, device), 1), "scratch_bar_mb": 2 * options.inflight_mb}


def exposed(optimizer: ShardedMuon, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """What transfers add to a step, over what they take alone; a step with and one without them take turns. Weights are
    of no use after this."""
    if not optimizer.plan.num_collectives:
        return {"exposed_ms": 0.0, "transfers_alone_ms": 0.0}
    runners = {task.runner for task in optimizer._tasks}

    def alone() -> None:
        for task in optimizer._tasks:
            for into, out in ((task.momentum_in, task.momentum_out), (task.update_in, task.update_out)):
                buffers = task.runner.empty(sum(into)), task.runner.empty(sum(out))
                if work := task.runner.transfer(task.bucket, *buffers, into, out):
                    work.wait()

    def without() -> None:
        for runner in runners:
            runner.transfer = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
        for runner in runners:
            del runner.transfer  # the method is seen again

    found = interleaved({"whole": optimizer.step, "transfers": alone, "without": without}, device, options)
    added = max(0.0, found["whole"] - found["without"])
    return {
        "exposed_ms": round(added, 3),
        "transfers_alone_ms": found["transfers"],
        "without_transfers_ms": found["without"],
        "exposed_share": round(added / found["transfers"], 3),
    }


def machine(rows: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Ceilings of the case with most products, as `woodshed.muon.cost.Machine` reads them. The error is the largest
    between that model and the steps measured here."""
    widest = max(rows, key=lambda row: row["ceilings"]["products_ms"])["ceilings"]
    assumed = Machine()
    error = max(abs(row["ceilings"]["floor_ms"] / row["ms"]["ours"] - 1) for row in rows)
    return {
        "name": cases.describe(device)["card"],
        "product_flops": widest["product_flops"],
        "memory_bytes_per_s": widest["memory_bytes_per_s"],
        "link_bytes_per_s": widest["link_bytes_per_s"] or assumed.link_bytes_per_s,
        "network_bytes_per_s": assumed.network_bytes_per_s,
        "form_factor": 1.0,
        "error": round(error, 3),
        "is_measured": True,
    }


def show(row: dict[str, Any], device: torch.device) -> None:
    if dist.get_rank():
        return
    bar = 0.85 if dist.get_world_size() == 1 else 0.80
    missed = "" if row["efficiency"] >= bar or device.type == "cpu" else f"  MISSED {bar}"
    ceiling = row["ceilings"]
    print(f"\n{row['case']} ({row['layers']} layers): ours {row['ms']['ours']:.2f} ms, floor {ceiling['floor_ms']:.2f} "
          f"(products {ceiling['products_ms']:.2f}, transfers {ceiling['transfers_ms']:.2f}, element-wise "
          f"{ceiling['elementwise_ms']:.2f}), efficiency {row['efficiency']:.2f}{missed}")  # fmt: skip
    for other, times in row["speedup"].items():
        wanted = BARS.get(other)
        below = wanted is not None and times < wanted and device.type == "cuda"
        print(
            f"  {other:<24}{row['ms'][other]:>10.2f} ms{times:>8.2f} x{f'  MISSED {wanted}' if below else ''}"
        )
    for other, why in row["refused"].items():
        print(f"  {other} refused: {why}")
    for other, seen in row.get("profile", {}).items():
        print(f"  busy in one step of {other}: {seen['busy_ms']} ms", *seen["kernels"], sep="\n      ")
    for name, ms in row["ablations_ms"].items():
        print(f"  {name:<24}{ms:>10.2f} ms")
    for key in ("exposed_ms", "transfers_alone_ms", "exposed_share", "scratch_mb", "scratch_bar_mb"):
        if key in row:
            print(f"  {key:<24}{row[key]:>10}", flush=True)


if __name__ == "__main__":
    main()
