"""Sharded Muon in one process: units, plans, numerics, refusals, costs."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from woodshed.muon import (
    Experts,
    Heads,
    MuonError,
    MuonSettings,
    NewtonSchulz,
    ShardedMuon,
    Whole,
    clip_grad_norm_,
    import_state,
    planner,
    qk_clip_,
    sim,
)
from woodshed.muon import plan as plans
from woodshed.muon.cost import Machine, Work, predict
from woodshed.muon.grid import Grid, blocks, chunk, size
from woodshed.muon.layout import arrange
from woodshed.muon.newton_schulz import fastest, normalised
from woodshed.muon.units import cost, flops, match_rms_adamw, spectral, spectral_unclamped

EXACT = MuonSettings(newton_schulz=NewtonSchulz(dtype=torch.float32), wire_dtype=torch.float32)


def parameter(*shape: int, seed: int = 0) -> nn.Parameter:
    made = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    made.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 100))
    return made


def gradient(of: nn.Parameter) -> torch.Tensor:
    assert of.grad is not None
    return of.grad


# Geometry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "parts"), [(12, 4), (13, 4), (3, 8), (5, 8), (0, 2), (9, 2)])
def test_chunks_are_those_of_torch(length: int, parts: int):
    expected = [len(part) for part in torch.arange(length).chunk(parts)] if length else []
    ours = [stop - start for start, stop in chunk((0, length), parts)]
    assert [each for each in ours if each] == expected
    assert len(ours) == parts


def test_cells_that_meet_a_box_tile_it():
    grid = Grid((blocks([3, 1, 4]), ((0, 2), (2, 5), (5, 5), (5, 9))))
    box = ((2, 7), (1, 9))
    seen = torch.zeros(8, 9, dtype=torch.int)
    for cell, ((top, bottom), (left, right)) in grid.overlaps(box):
        seen[top:bottom, left:right] += 1
        (a, b), (c, d) = grid.box(cell)
        assert a <= top < bottom <= b and c <= left < right <= d
    assert seen.sum() == size(box) and seen.max() == 1
    assert len(grid) == 12


@pytest.mark.parametrize("expert_first", [True, False])
def test_fsdp_over_expert_parallel_cuts_the_expert_shard(expert_first: bool):
    """10 experts over EP 2, then FSDP 2 inside: 5 and 5, each 3 and 2."""
    ranks = torch.arange(4).view(2, 2)  # (fsdp, ep)
    storage = arrange("w", (10, 4, 4), ranks, [_StridedShard(0, split_factor=2), Shard(0)])
    rows = {rank: storage.grid.box(storage.find(rank)[1])[0] for rank in range(4)}
    assert rows == {0: (0, 3), 2: (3, 5), 1: (5, 8), 3: (8, 10)}
    with pytest.raises(MuonError, match="interleave dimension 0"):
        arrange("w", (10, 4, 4), ranks, [_StridedShard(0, split_factor=4), Shard(0)])


# Units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "shape", "said"),
    [
        (Whole(), (7,), "w: Whole.. needs a 2-D parameter, and this one has shape .7,."),
        (Whole(), (8, 3, 3, 3), r'shape \(8, 3, 3, 3\).*adamw=dict\(match=\[..., "w"\]\)'),
        (Heads(rows=5), (12, 8), r"w: rows=5 does not divide its 12 rows \(2.40 blocks\)"),
        (Heads(cols=3), (12, 8), "w: cols=3 does not divide its 8 cols"),
        (Heads(rows=(8, 8)), (12, 8), "add up to 16, not to its 12 rows"),
        (Heads(), (12, 8), "rows or cols"),
        (Heads(rows=4), (2, 12, 8), "Heads needs a 2-D"),
        (Experts(), (12, 8), "Experts needs a 3-D"),
        (Experts(rows=0), (2, 12, 8), "rows=0 does not divide"),
    ],
)
def test_units_that_do_not_fit_are_refused(units: Any, shape: tuple[int, ...], said: str):
    with pytest.raises(MuonError, match=said):
        ShardedMuon([("w", parameter(*shape))], lr=0.1, units={"w": units})


def test_four_dimensions_need_adamw():
    conv = ("conv.weight", parameter(8, 3, 3, 3))
    with pytest.raises(MuonError, match=r'adamw=dict\(match=\[..., "conv.weight"\]\)'):
        ShardedMuon([conv], lr=0.1)
    optimizer = ShardedMuon([conv, ("w", parameter(4, 4))], lr=0.1, adamw={"match": ["conv*"]})
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    optimizer.step()


def test_scale_and_cost_are_those_of_the_unit():
    assert match_rms_adamw(4, 9) == pytest.approx(0.6)
    assert (spectral(4, 16), spectral(16, 4)) == (1.0, 2.0)
    assert (spectral_unclamped(4, 16), spectral_unclamped(16, 4)) == (0.5, 2.0)
    assert flops(2048, 7168) == flops(7168, 2048) == pytest.approx(6.87e11, rel=1e-3)
    assert cost(2048, 7168) == flops(2048, 7168)
    assert cost(128, 7168) > flops(128, 7168)  # bound by memory
    with pytest.raises(MuonError, match=r"scale='rms'.*match_rms_adamw"):
        ShardedMuon([("w", parameter(4, 4))], lr=0.1, settings=MuonSettings(scale="rms"))


# Plan -------------------------------------------------------------------------------------------------------------


def stack(num_experts: int, world: int, layers: int = 1, dim: int = 0) -> list[plans.Spec]:
    shape = (num_experts, 64, 96)
    storage = arrange("w", shape, torch.arange(world), [Shard(dim)])
    return [plans.Spec(f"{n}.w", shape, Experts().grid("w", shape), storage) for n in range(layers)]


def test_whole_experts_stay():
    made = planner.build(stack(32, 8, layers=3))
    assert made.num_collectives == 0
    assert all(made.sent_bytes(rank) == 0 for rank in range(8))
    assert made.imbalance == 0


def test_experts_that_do_not_divide_send_their_surplus_only():
    """12 experts over 8 ranks lie as 2, 2, 2, 2, 2, 2, 0, 0: a quarter of them moves, and the load is level."""
    made = planner.build(stack(12, 8, layers=2))
    one = made.exchanges[0]
    holders = planner.storing(one.specs, one.units)
    assert sum([owner] != held for owner, held in zip(one.owners, holders, strict=True)) == 6
    assert made.imbalance == pytest.approx(0)
    everything = planner.build(stack(12, 8, layers=2), planner.Rules(placement="all_to_all"))
    assert sum(map(made.sent_bytes, range(8))) < 0.4 * sum(map(everything.sent_bytes, range(8)))
    stay = planner.build(stack(12, 8, layers=2), planner.Rules(placement="local"))
    assert stay.num_collectives == 0
    assert stay.imbalance == pytest.approx(1 / 3)


def check_routes(exchange: plans.Exchange, ranks: list[int]) -> None:
    """Every element leaves its rank once, reaches its owner once, and its update every rank that stores it."""
    for rank in ranks:
        stored = sum(size(shard.box) for shard in exchange.shards(rank))
        _, position = exchange.specs[0].storage.find(rank)
        assert stored == sum(size(spec.storage.grid.box(position)) for spec in exchange.specs)
    owned = {rank: list(exchange.owned_shards(rank)) for rank in ranks}
    members = {rank: exchange.members(rank) for rank in ranks}
    sent = {
        (rank, members[rank][shard.member], shard.unit, shard.box, shard.is_sent)
        for rank in ranks
        for shard in exchange.shards(rank)
    }
    got = {
        (members[rank][shard.member], rank, shard.unit, shard.box, shard.is_sent)
        for rank in ranks
        for shard in owned[rank]
    }
    chosen = set(ranks)
    assert {each for each in sent if each[1] in chosen} == {each for each in got if each[0] in chosen}
    for rank in ranks:
        for unit, shards in itertools.groupby(owned[rank], key=lambda shard: shard.unit):
            listed = list(shards)
            whole = exchange.units[unit].rows * exchange.units[unit].cols
            copies = len(exchange.ranks) if exchange.is_split else 1
            assert sum(size(shard.box) for shard in listed if shard.is_sent) == whole
            assert sum(size(shard.box) for shard in listed) == whole * copies


@pytest.mark.parametrize("mode", ["split", "redundant"])
def test_every_element_goes_there_and_back_once(mode: planner.ReplicaMode):
    ranks = torch.arange(8).view(2, 4)
    shapes = {"a": (13, 10), "b": (24, 6), "c": (5, 7)}
    specs = [
        plans.Spec(n, s, Whole().grid(n, s), arrange(n, s, ranks, [Replicate(), Shard(0)]))
        for n, s in shapes.items()
    ]
    made = planner.build(specs, planner.Rules(replica_mode=mode, bucket_bytes=300))
    check_routes(made.exchanges[0], list(range(8)))


def test_replicas_share_the_work_where_that_pays():
    """Large products do; matrices whose updates cost more to send than to compute do not."""
    ranks = torch.arange(8).view(2, 4)

    def made(mode: planner.ReplicaMode, rows: int, placements: list[Any]) -> plans.Exchange:
        shape = (8, rows, 96) if placements[1] == Shard(0) else (rows, 96)
        units = Experts() if len(shape) == 3 else Whole()
        storage = arrange("w", shape, ranks, placements)
        specs = [plans.Spec(f"{n}", shape, units.grid("w", shape), storage) for n in range(16)]
        return planner.build(specs, planner.Rules(replica_mode=mode)).exchanges[0]

    cut = made("auto", 4096, [Replicate(), Shard(1)])
    assert cut.is_split
    redundant = made("redundant", 4096, [Replicate(), Shard(1)])
    assert max(cut.loads) == pytest.approx(max(redundant.loads) / 2)
    # whole experts: redundant work moves nothing, and 8 rows cost less to multiply than to send
    assert not made("auto", 8, [Replicate(), Shard(0)]).is_split


def test_kimi_k2_5_on_512_ranks():
    """61 layers, 69,120 expert matrices, dense weights in 8 replicas: planned in seconds, level, and complete."""
    started = time.process_time()
    made = planner.build(sim.specs(sim.Family(), 512), planner.Rules(bucket_bytes=1 << 29))
    assert made.digest
    seconds = time.process_time() - started
    assert seconds < 10
    experts = next(each for each in made.exchanges if len(each.ranks) == 1)
    dense = next(each for each in made.exchanges if len(each.ranks) == 8)
    assert len(experts.units) == 60 * 384 * 3
    assert made.imbalance < 0.02
    for each in planner.build(sim.specs(sim.Family(layers=4), 512)).exchanges:
        check_routes(each, list(range(512)))
    for each in made.exchanges:
        for bucket in each.buckets:  # a unit is never cut: one alone, times its replicas, may need more
            most = max(Counter(each.owners[unit] for unit in bucket.units).values())
            assert bucket.scratch_bytes <= 1 << 29 or most == 1
    # 384 experts over 512 ranks: a quarter moves, to ranks that have none
    sent = sum(map(experts.sent_bytes, range(512)))
    assert sent == pytest.approx(2 * 2 * sum(u.rows * u.cols for u in experts.units) / 4, rel=0.02)
    assert dense.is_split


def test_a_plan_prints_what_it_does():
    text = planner.build(stack(12, 8, layers=2)).describe()
    assert "24 of 64 x 96: 3 to 3 on a rank" in text
    assert "prediction (H100, assumed" in text
    assert planner.build(stack(12, 8)).digest == planner.build(stack(12, 8)).digest
    assert (
        planner.build(stack(12, 8, layers=2)).digest
        != planner.build(stack(12, 8, layers=2), planner.Rules(placement="local")).digest
    )
    assert hash(planner.build(stack(12, 8))) == hash(planner.build(stack(12, 8)))


def test_the_cost_model_in_closed_form():
    machine = Machine(
        product_flops=1e12, memory_bytes_per_s=1e12, link_bytes_per_s=1e9, network_bytes_per_s=1e8
    )
    inside = predict(2e12, [Work(sent_bytes=1e9, elements=1e10, num_ranks=8, num_buckets=10)], machine)
    assert inside.products_s == 2 and inside.transfer_s == 1
    assert inside.total_s == pytest.approx(2 + 24e10 / 1e12 + 0.1)
    outside = predict(2e12, [Work(sent_bytes=1e9, elements=0, num_ranks=71, num_buckets=10)], machine)
    assert outside.transfer_s == pytest.approx(9)
    assert outside.total_s == pytest.approx(9 + 0.9)


def test_how_many_cards_for_a_target():
    small = sim.Family(
        hidden=256, layers=4, dense_width=512, experts=128, expert_width=128, heads=4, q_rank=64, kv_rank=64
    )
    machine = Machine(product_flops=1e11, error=0.3)
    predictions = {gpus: sim.predict(gpus, machine, small)[1] for gpus in (64, 128)}
    slow, fast = predictions[64].total_s, predictions[128].total_s
    assert fast < 0.6 * slow
    assert sim.fewest(1.1 * fast, predictions).split(": ")[1].startswith("128 cards (")
    assert sim.fewest(1.1 * slow, predictions).split(": ")[1].startswith("64 cards (64 if")
    assert "more than 128 cards (128 if the low end of" in sim.fewest(0.8 * fast, predictions)
    assert "more than 128 if the high end" in sim.fewest(1.1 * fast, predictions)


# Newton-Schulz ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 48, 112), (3, 112, 48), (2, 40, 40)])
@pytest.mark.parametrize(
    ("coefficients", "low", "high"), [("jordan", 0.65, 1.15), ("polar_express", 0.85, 1.13)]
)
@pytest.mark.parametrize("backend", ["standard", "gram"])
def test_singular_values_end_near_one(
    shape: tuple[int, ...], coefficients: Any, low: float, high: float, backend: Any
):
    """And the singular vectors stay: the polar factor is met as closely as the band allows."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    spread = torch.linspace(0.2, 1, min(shape[1:]))
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    x = u * spread @ v
    out = NewtonSchulz(coefficients, dtype=torch.float32, backend=backend)(x)
    values = torch.linalg.svdvals(out)
    assert low < values.min() and values.max() < high
    assert torch.linalg.matrix_norm(out - u @ v, 2).max() < max(1 - low, high - 1)


def test_gram_form_equals_the_standard_one():
    x = torch.randn(2, 32, 96, generator=torch.Generator().manual_seed(1))
    for coefficients in ("jordan", "polar_express"):
        standard = NewtonSchulz(coefficients, dtype=torch.float32, backend="standard")(x)
        gram = NewtonSchulz(coefficients, dtype=torch.float32, backend="gram")(x)
        torch.testing.assert_close(gram, standard, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(96, 336), (336, 96), (96, 150)])
@pytest.mark.parametrize("spectrum", ["normal", "decaying", "low rank"])
@pytest.mark.parametrize("coefficients", ["jordan", "polar_express"])
def test_the_gram_form_rounds_less_than_the_standard_one(shape: Any, spectrum: str, coefficients: Any):
    """Against the same polynomials in float64, both asked for bfloat16; and it keeps away from U V^T no more."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, values, v = torch.linalg.svd(x, full_matrices=False)
    if spectrum == "decaying":
        values = torch.logspace(0, -4, len(values), dtype=torch.float64)
    elif spectrum == "low rank":
        values = torch.where(torch.arange(len(values)) < 6, 1.0, 1e-3).double()
    x = (u * values @ v)[None]
    exact = NewtonSchulz(coefficients, dtype=torch.float64, backend="standard")(x)
    standard, gram = (
        NewtonSchulz(coefficients, backend=backend)(x).double() for backend in ("standard", "gram")
    )
    norm = torch.linalg.matrix_norm
    assert norm(gram - exact) < 0.7 * norm(standard - exact)
    assert norm(gram - u @ v) < 1.02 * norm(standard - u @ v)
    assert norm(gram, 2) < 1.05 * norm(exact, 2)


@pytest.mark.parametrize(
    ("m", "n", "symmetric", "form"),
    [
        (2048, 7168, True, "gram"),
        (1408, 2048, True, "gram"),
        (1408, 2048, False, "standard"),
        (2048, 7168, False, "gram"),
        (128, 7168, True, "gram"),
        (192, 256, True, "standard"),
        (4096, 4096, True, "symmetric"),
        (4096, 4096, False, "standard"),
        (512, 512, True, "standard"),
    ],
)
def test_the_default_takes_the_form_with_fewest_products(m: int, n: int, symmetric: bool, form: str):
    assert fastest(m, n, symmetric) == form
    half = 0.5 if symmetric and m >= 1024 else 1.0
    wide, square = 2 * m * m * n, 2 * m**3
    products = {
        "standard": 5 * (half + 1) * wide + 5 * half * square,
        "gram": (2 * half + 2) * wide + 14 * half * square,
    }
    assert products["gram" if form == "gram" else "standard"] == min(products.values())


@pytest.mark.parametrize("exponent", [10, 0, -3, -10, -20, -30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_the_input_does_not_matter(exponent: int, dtype: torch.dtype):
    x = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    factor = 2.0 ** round(3.3219 * exponent)  # a power of two: no rounding of its own
    solve = NewtonSchulz(dtype=torch.float32)
    torch.testing.assert_close(solve(x * factor), solve(x), rtol=1e-6, atol=1e-6)


def test_zero_stays_zero_and_nan_stays_alone():
    x = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(1))
    clean = NewtonSchulz(dtype=torch.float32)(x)
    x[1] = 0
    x[2, 3, 3] = float("inf")
    x[3, 0, 0] = float("nan")
    out = NewtonSchulz(dtype=torch.float32)(x)
    assert torch.equal(out[0], clean[0])
    assert not out[1:].any()
    assert normalised(x, torch.float32)[0].norm() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 0}, "steps=0"),
        ({"coefficients": "kj"}, 'coefficients=\'kj\': use "jordan", "polar_express"'),
        ({"coefficients": ((1.0, 2.0),)}, r"\(\(a, b, c\), ...\)"),
        ({"dtype": torch.int8}, "use bfloat16"),
    ],
)
def test_wrong_newton_schulz_settings(settings: dict[str, Any], said: str):
    with pytest.raises(MuonError, match=said):
        NewtonSchulz(**settings)


def test_own_coefficients_repeat_the_last():
    assert NewtonSchulz(((1.0, 0.0, 0.0), (2.0, 0.0, 0.0)), steps=4).triples[2:] == ((2.0, 0.0, 0.0),) * 2


# Optimizer --------------------------------------------------------------------------------------------------------


def test_equals_torch_muon():
    """torch.optim.Muon on the same bfloat16 products, whole matrices, ten steps."""
    ours, theirs = parameter(24, 40), parameter(24, 40)
    a = ShardedMuon([("w", ours)], lr=0.02, weight_decay=0.1, settings=MuonSettings(wire_dtype=torch.float32))
    b = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    start = ours.detach().clone()
    for step in range(10):
        ours.grad = torch.randn(24, 40, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() / moved < 2e-2


def test_adamw_side_equals_torch_adamw():
    ours, theirs = parameter(7), parameter(7)
    a = ShardedMuon([("norm", ours)], lr=0.1, adamw={"lr": 0.01, "weight_decay": 0.2})
    b = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)
    for _ in range(3):
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs)


def test_groups_have_their_own_settings():
    fast, slow, norm = parameter(6, 8), parameter(6, 8), parameter(8)
    optimizer = ShardedMuon(
        [
            {"params": [("fast", fast)], "lr": 0.2},
            {"params": [("slow", slow), ("norm", norm)], "weight_decay": 0.0, "adamw": {"lr": 0.5}},
        ],
        lr=0.1,
        settings=EXACT,
    )
    start = slow.detach().clone()
    optimizer.step()
    step = NewtonSchulz(dtype=torch.float32)((1.95 * gradient(slow))[None])[0] * 0.2 * 8**0.5
    torch.testing.assert_close(slow.detach(), start - 0.1 * step)
    torch.testing.assert_close(fast.detach(), start * (1 - 0.02) - 0.2 * step)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1, 0.5]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # as a scheduler would
    before = [p.detach().clone() for p in (fast, slow, norm)]
    optimizer.step()
    assert all(torch.equal(p.detach(), b) for p, b in zip((fast, slow, norm), before, strict=True))


def test_the_order_of_parameters_and_the_budget_do_not_matter():
    names = [("a", (8, 12)), ("b", (5, 6, 10)), ("c", (12, 8)), ("d", (8, 12))]

    def run(order: list[int], **settings: Any) -> list[torch.Tensor]:
        held = [(names[i][0], parameter(*names[i][1], seed=i)) for i in order]
        optimizer = ShardedMuon(held, lr=0.1, settings=replace(EXACT, **settings))
        optimizer.step()
        optimizer.step()
        return [tensor.detach() for _, tensor in sorted(held)]

    expected = run([0, 1, 2, 3])
    for other in (run([3, 1, 0, 2]), run([0, 1, 2, 3], max_inflight_bytes=1)):
        for a, b in zip(expected, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_zero_gradient_is_pure_weight_decay():
    weight = parameter(6, 9)
    weight.grad = torch.zeros(6, 9)
    before = weight.detach().clone()
    ShardedMuon([("w", weight)], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), before * 0.95)


def test_short_weights_and_momentum():
    """bfloat16 weights move as float32 ones do, rounded once; momentum keeps its own type through a checkpoint."""
    short, long = nn.Parameter(parameter(16, 24).detach().bfloat16()), parameter(16, 24)
    with torch.no_grad():
        long.copy_(short)
    short.grad, long.grad = torch.ones_like(short), torch.ones_like(long)
    optimizers = [ShardedMuon([("w", p)], lr=0.1) for p in (short, long)]
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(short.detach(), long.detach().bfloat16())
    buffer = optimizers[0].state[short]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    buffer.add_(1e-5)
    twin = nn.Parameter(short.detach().clone())
    other = ShardedMuon([("w", twin)], lr=0.1)
    other.load_state_dict(optimizers[0].state_dict())
    assert torch.equal(other.state[twin]["momentum_buffer"], buffer)
    small = ShardedMuon(
        [("w", parameter(4, 4))], lr=0.1, settings=MuonSettings(momentum_dtype=torch.bfloat16)
    )
    small.step()
    assert next(iter(small.state.values()))["momentum_buffer"].dtype == torch.bfloat16


def test_state_dict_goes_on_bitwise():
    def fresh() -> tuple[dict[str, nn.Parameter], ShardedMuon]:
        held = {"w": parameter(6, 9), "e": parameter(3, 4, 5), "v": parameter(5)}
        return held, ShardedMuon(list(held.items()), lr=0.1)

    held, optimizer = fresh()
    optimizer.step()
    twin, resumed = fresh()
    with torch.no_grad():
        for name in held:
            twin[name].copy_(held[name])
    resumed.load_state_dict(optimizer.state_dict())
    for each in (optimizer, resumed):
        for group in each.param_groups:
            group["lr"] = 0.05  # loading replaces the groups; settings are read from the new ones
    optimizer.step()
    resumed.step()
    assert all(torch.equal(held[name], twin[name]) for name in held)


def test_a_closure_is_called_and_gradients_are_kept():
    weight = parameter(4, 4)
    before = gradient(weight).clone()
    assert ShardedMuon([("w", weight)], lr=0.1).step(lambda: 3.0) == 3.0
    assert torch.equal(gradient(weight), before)


def test_momentum_of_other_optimizers():
    """Ten steps of torch.optim.Muon, then five of ours with its momentum: as fifteen of ours."""
    theirs, ours = parameter(12, 20), parameter(12, 20)
    start = theirs.detach().clone()
    torch_muon = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    straight = ShardedMuon(
        [("w", ours)], lr=0.01, weight_decay=0.0, settings=MuonSettings(wire_dtype=torch.float32)
    )
    for step in range(10):
        for each, optimizer in ((theirs, torch_muon), (ours, straight)):
            each.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    taken = ShardedMuon(
        [("w", theirs)], lr=0.01, weight_decay=0.0, settings=MuonSettings(wire_dtype=torch.float32)
    )
    assert import_state(taken, {"w": torch_muon.state[theirs]}, "torch.optim.Muon") == ["w"]
    torch.testing.assert_close(
        taken.state[theirs]["momentum_buffer"], straight.state[ours]["momentum_buffer"]
    )
    for step in range(10, 15):
        for each, optimizer in ((theirs, taken), (ours, straight)):
            each.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    assert (ours - theirs).norm() / (ours - start).norm() < 2e-2
    summed = {"momentum": torch.full((12, 20), 2.0)}
    import_state(taken, {"w": summed}, "dion")
    assert torch.equal(taken.state[theirs]["momentum_buffer"], summed["momentum"])


def test_what_cannot_be_imported():
    optimizer = ShardedMuon([("w", parameter(4, 4)), ("v", parameter(4))], lr=0.1)
    with pytest.raises(MuonError, match="source='muon': use one of"):
        import_state(optimizer, {}, "muon")  # pyright: ignore[reportArgumentType]
    with pytest.raises(MuonError, match="x: no such parameter"):
        import_state(optimizer, {"x": {}}, "dion")
    with pytest.raises(MuonError, match="v: AdamW updates it here"):
        import_state(optimizer, {"v": {"momentum_buffer": torch.zeros(4)}}, "torch.optim.Muon")
    with pytest.raises(MuonError, match=r"torch\.distributed\.checkpoint"):
        import_state(optimizer, {"w": {"momentum": torch.zeros(2, 4)}}, "dion")
    adam = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.full((4,), 2.0)}
    assert import_state(optimizer, {"v": adam}, "torch.optim.AdamW") == ["v"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"adamw": {"beta": (0.9, 0.95)}}, "adamw has no setting 'beta'; did you mean 'betas'"),
    ],
)
def test_wrong_arguments_say_what_to_pass(settings: dict[str, Any], said: str):
    with pytest.raises(MuonError, match=said):
        ShardedMuon([("w", parameter(4, 4))], **{"lr": 0.1, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wire_dtype": torch.float16}, "wire_dtype=torch.float16: use torch.bfloat16 or torch.float32"),
        ({"starved": "ignore"}, "starved='ignore': use one of step, skip, decay_only"),
        ({"nonfinite": "skip"}, "nonfinite='skip': use one of raise, skip_unit, unchecked"),
        ({"placement": "here"}, "placement='here': use one of auto, local, all_to_all"),
        ({"replica_mode": "dedup"}, "replica_mode='dedup': use one of auto, redundant, split"),
        ({"max_inflight_bytes": 0}, "max_inflight_bytes=0"),
    ],
)
def test_wrong_settings_say_what_to_pass(settings: dict[str, Any], message: str):
    with pytest.raises(MuonError, match=message):
        MuonSettings(**settings)


def test_parameters_need_names_and_cannot_come_later():
    with pytest.raises(MuonError, match="named_parameters"):
        ShardedMuon([parameter(4, 4)], lr=0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(MuonError, match="no parameter needs a gradient"):
        ShardedMuon([("w", parameter(4, 4).requires_grad_(False))], lr=0.1)
    with pytest.raises(MuonError, match="'decay'"):
        ShardedMuon([{"params": [("w", parameter(4, 4))], "decay": 1.0}], lr=0.1)
    optimizer = ShardedMuon([("w", parameter(4, 4))], lr=0.1)
    with pytest.raises(MuonError, match="build a new ShardedMuon"):
        optimizer.add_param_group({"params": [("v", parameter(4, 4))]})
    with pytest.raises(MuonError, match="contiguous"):
        ShardedMuon([("w", nn.Parameter(torch.randn(4, 6).T))], lr=0.1)
    tied = parameter(4, 4)
    with pytest.raises(MuonError, match="named a"):
        ShardedMuon([("a", tied), ("b", nn.Parameter(tied.detach()))], lr=0.1)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_and_infinity_in_one_process(value: str):
    weight, vector = parameter(3, 4, 5), parameter(4)
    optimizer = ShardedMuon([("e", weight), ("v", vector)], lr=0.1)
    gradient(weight)[1, 0, 0] = float(value)
    before = weight.detach().clone()
    with pytest.raises(MuonError, match="gradient of e; nothing was changed"):
        optimizer.step()
    assert torch.equal(weight.detach(), before)
    assert not optimizer.state[weight]["momentum_buffer"].any()
    loose = ShardedMuon([("e", weight), ("v", vector)], lr=0.1, settings=MuonSettings(nonfinite="unchecked"))
    loose.step()
    assert torch.isfinite(weight[[0, 2]]).all()  # never spreads to other units
    skipping = ShardedMuon(
        [("e", weight), ("v", vector)], lr=0.1, settings=MuonSettings(nonfinite="skip_unit")
    )
    alone = weight.detach()[1].clone()
    skipping.step()
    assert torch.equal(weight.detach()[1], alone) and skipping.skipped == {"e": 1}


def test_clipping_in_one_process_equals_torch():
    ours, theirs = [parameter(4, 5), parameter(3)], [parameter(4, 5), parameter(3)]
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    torch.testing.assert_close(clip_grad_norm_(ours, 0.5), expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    gradient(ours[0])[0, 0] = float("inf")
    with pytest.raises(MuonError, match="norm of all gradients is inf"):
        clip_grad_norm_(ours, 0.5, error_if_nonfinite=True)


def test_qk_clip_refuses_heads_that_do_not_fit():
    with pytest.raises(MuonError, match="3 heads do not divide"):
        qk_clip_(torch.ones(3), torch.randn(8, 4), torch.randn(8, 4))
    with pytest.raises(MuonError, match="4 query heads of 2 rows do not fit a key of 7 rows"):
        qk_clip_(torch.ones(4), torch.randn(8, 4), torch.randn(7, 4))
