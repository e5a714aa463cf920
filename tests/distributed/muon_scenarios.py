"""What ranks do in the tests of `test_muon_distributed.py`; every function runs on all ranks of a world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from muon_matrix import chunk, lay
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from woodshed.muon import (
    Experts,
    Heads,
    MuonError,
    MuonSettings,
    NewtonSchulz,
    ShardedMuon,
    clip_grad_norm_,
    qk_clip_,
)
from woodshed.muon.layout import local

EXACT = MuonSettings(newton_schulz=NewtonSchulz(dtype=torch.float32), wire_dtype=torch.float32)


class Collectives(TorchDispatchMode):
    """Counts every collective and the bytes that all-to-alls send to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            self.counts[name] = self.counts.get(name, 0) + 1
            if name == "alltoall_base_":
                _, out, group, _, sizes = args[:5]
                me = dist.ProcessGroup.unbox(group).rank()
                others = sum(size for rank, size in enumerate(sizes) if rank != me)
                self.sent_bytes += others * out.element_size()
        return func(*args, **(kwargs or {}))


def parameters(
    shapes: dict[str, tuple[int, ...]], where: dict[str, Any], seed: int = 0
) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(lay(torch.randn(shape, generator=generator), *where[name]))
        for name, shape in shapes.items()
    }


def set_grads(held: dict[str, nn.Parameter], where: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    full = {name: torch.randn(p.shape, generator=generator) for name, p in held.items()}
    for name, parameter in held.items():
        parameter.grad = lay(full[name], *where[name])
    return full


def traffic() -> list[dict[str, Any]]:
    """Counted and planned collectives of one step: whole experts, cut ones, uneven shards, split replicas."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    wide = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    experts = {"a": (2 * world, 8, 12), "b": (world, 12, 8)}
    mixed = {"o": (24, 40), "q": (48, 10), "e": (world + 1, 6, 10), "bias": (7,)}
    rows = []
    cases: tuple[tuple[str, dict[str, tuple[int, ...]], Any, dict[str, Any]], ...] = (
        ("whole experts", experts, (flat, [Shard(0)]), {}),
        ("cut experts", experts, (flat, [Shard(1)]), {"settings": MuonSettings(max_inflight_bytes=4000)}),
        ("everything", mixed, (flat, [Shard(0)]), {"units": {"q": Heads(rows=12)}}),
        (
            "split replicas",
            mixed,
            (wide, [Replicate(), Shard(0)]),
            {"settings": MuonSettings(replica_mode="split")},
        ),
        (
            "redundant replicas",
            mixed,
            (wide, [Replicate(), Shard(0)]),
            {"settings": MuonSettings(replica_mode="redundant")},
        ),
    )
    for what, shapes, place, settings in cases:
        where = dict.fromkeys(shapes, place)
        held = parameters(shapes, where)
        optimizer = ShardedMuon(list(held.items()), lr=0.1, **settings)
        set_grads(held, where, 1)
        with Collectives() as seen:
            optimizer.step()
        rows.append(
            {
                "what": what,
                "counts": seen.counts,
                "sent_bytes": seen.sent_bytes,
                "planned_collectives": optimizer.plan.num_collectives,
                "planned_bytes": optimizer.plan.sent_bytes(dist.get_rank()),
                "buckets": sum(len(each.buckets) for each in optimizer.plan.exchanges),
                "digest": optimizer.plan.digest,
            }
        )
    return rows


def missing_gradients() -> float:
    """A gradient that only some ranks have counts as zeros on the others."""
    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = {"a": (8, 12), "e": (8, 6, 4), "never": (8, 8)}
    where = dict.fromkeys(shapes, (flat, [Shard(0)]))
    errors = []
    held, twin = parameters(shapes, where), parameters(shapes, where)
    for group, explicit in ((held, False), (twin, True)):
        optimizer = ShardedMuon(list(group.items()), lr=0.1, settings=EXACT)
        for step in range(2):
            full = set_grads(group, where, step)
            for name in full:
                if name == "never" or dist.get_rank() == 1:
                    grad = group[name].grad
                    assert grad is not None
                    group[name].grad = torch.zeros_like(grad) if explicit else None
            optimizer.step()
    for name in shapes:
        errors.append((local(held[name].detach()) - local(twin[name].detach())).abs().max().item())
    return max(errors)


def nonfinite() -> dict[str, Any]:
    """One NaN on one rank: raised everywhere with nothing changed, or kept inside its unit."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    shapes = {"a": (8, 12), "e": (4, 8, 6), "v": (2 * world,)}
    where = {"a": (flat, [Shard(0)]), "e": (flat, [Shard(1)]), "v": (flat, [Shard(0)])}
    out: dict[str, Any] = {}
    for mode in ("raise", "skip_unit"):
        held, clean = parameters(shapes, where), parameters(shapes, where)
        optimizer = ShardedMuon(list(held.items()), lr=0.1, settings=replace(EXACT, nonfinite=mode))
        reference = ShardedMuon(list(clean.items()), lr=0.1, settings=EXACT)
        before = {name: local(p.detach()).clone() for name, p in held.items()}
        set_grads(held, where, 1)
        set_grads(clean, where, 1)
        if dist.get_rank() == world - 1:
            for name in ("e", "v"):
                shard = local(held[name].grad)  # pyright: ignore[reportArgumentType]
                shard.view(-1)[0] = float("nan")  # expert 0
        if mode == "raise":
            try:
                optimizer.step()
                out["message"] = ""
            except MuonError as error:
                out["message"] = str(error)
            out["changed"] = any(not torch.equal(local(p.detach()), before[n]) for n, p in held.items())
            continue
        optimizer.step()
        reference.step()
        out["skipped"] = dict(optimizer.skipped)
        e, want = local(held["e"].detach()), local(clean["e"].detach())
        out["others"] = max(
            (local(held["a"] - clean["a"])).abs().max().item(), (e[1:] - want[1:]).abs().max().item()
        )
        out["alone"] = torch.equal(e[0], before["e"][0]) and torch.equal(
            local(held["v"].detach()), before["v"]
        )
        momentum = local(optimizer.state[held["e"]]["momentum_buffer"])
        out["momentum_clean"] = bool(torch.isfinite(momentum).all()) and not momentum[0].any()
    return out


def starved() -> dict[str, float]:
    """Expert 1 of 4, cut over all ranks, gets no gradient in the second step. How far it moves in each mode."""
    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    where = {"e": (flat, [Shard(1)])}
    moved = {}
    for mode in ("step", "skip", "decay_only"):
        held = parameters({"e": (4, 8, 6)}, where)
        optimizer = ShardedMuon(
            list(held.items()), lr=0.1, weight_decay=0.5, settings=replace(EXACT, starved=mode)
        )
        set_grads(held, where, 1)
        optimizer.step()
        before = held["e"].full_tensor().detach().clone()  # pyright: ignore[reportAttributeAccessIssue]
        set_grads(held, where, 2)
        grad = held["e"].grad
        assert grad is not None
        local(grad)[1] = 0
        optimizer.step()
        after = held["e"].full_tensor().detach()  # pyright: ignore[reportAttributeAccessIssue]
        change = (after - before)[1]
        moved[mode] = (change.norm() / before[1].norm()).item()
        moved[f"{mode}, others"] = (after - before)[0].norm().item()
    return moved


def clipping() -> dict[str, float]:
    """Joint norm over two meshes and a plain layout, against the norm of the full gradients."""
    world = dist.get_world_size()
    wide, flat = init_device_mesh("cpu", (2, world // 2)), init_device_mesh("cpu", (world,))
    shapes = {"dense": (13, 10), "experts": (5, 6, 4), "bias": (3,), "half": (16, 8)}
    where = {
        "dense": (wide, [Replicate(), Shard(0)]),
        "experts": (flat, [Shard(0)]),
        "bias": (flat, [Shard(0)]),
        "half": (flat, [Shard(0)]),
    }
    held = parameters(shapes, where)
    held["half"] = nn.Parameter(held["half"].detach().bfloat16())
    full = set_grads({k: v for k, v in held.items() if k != "half"}, where, 4)
    full["half"] = torch.randn(16, 8, generator=torch.Generator().manual_seed(7)).bfloat16()
    held["half"].grad = lay(full["half"], *where["half"])
    expected = torch.sqrt(sum((g.double().square().sum() for g in full.values()), torch.tensor(0.0))).item()
    norm = clip_grad_norm_(held.values(), 1.0).item()
    again = clip_grad_norm_(held.values(), 1e9).item()
    return {"expected": expected, "norm": norm, "clipped": again}


def qk_clipping() -> dict[str, float]:
    """Logits of every head shrink by its gamma: latent attention with a shared rotary key, and grouped queries."""
    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    heads, plain, rotary, value, width = 4, 6, 2, 5, 7
    generator = torch.Generator().manual_seed(0)
    errors = {}
    x, shared = torch.randn(9, width, generator=generator), torch.randn(9, rotary, generator=generator)
    peak = torch.tensor([50.0, 100.0, 200.0, 400.0])
    for what, keys, key_value_rows, rotary_rows in (("latent", heads, value, rotary), ("grouped", 2, 0, 0)):
        q = torch.randn(heads * (plain + rotary_rows), width, generator=generator)
        k = torch.randn(keys * (plain + key_value_rows), width, generator=generator)

        def logits(q: Tensor, k: Tensor, keys: int = keys, rotary_rows: int = rotary_rows) -> Tensor:
            queries, key = (x @ q.T).view(9, heads, -1), (x @ k.T).view(9, keys, -1)[..., :plain]
            key = key.repeat_interleave(heads // keys, 1)
            joined = torch.cat([key, shared[:, None, :rotary_rows].expand(9, heads, rotary_rows)], -1)
            return torch.einsum("shd,thd->hst", queries, joined)

        before = logits(q, k)
        query, key = lay(q, flat, [Shard(0)]), lay(k, flat, [Shard(0)])
        gamma = qk_clip_(peak, query, key, query_rotary_rows=rotary_rows, key_value_rows=key_value_rows)
        after = logits(query.full_tensor(), key.full_tensor())  # pyright: ignore[reportAttributeAccessIssue]
        errors[what] = (after - before * gamma[:, None, None]).abs().max().item()
        errors[f"{what} gamma"] = (gamma - torch.tensor([1, 1, 0.5, 0.25])).abs().max().item()
        values = key.full_tensor().view(keys, -1, width)[:, plain:]  # pyright: ignore[reportAttributeAccessIssue]
        untouched = torch.equal(values, k.view(keys, -1, width)[:, plain:])
        errors[f"{what} values"] = 0.0 if untouched else 1.0
    return errors


# Checkpoints ------------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """A dense matrix, a stack of experts, an embedding and a vector."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embed = nn.Parameter(torch.randn(20, 6, generator=generator))
        self.dense = nn.Linear(6, 13, bias=False)
        self.experts = nn.ParameterDict({"up": nn.Parameter(torch.randn(6, 8, 13, generator=generator) / 4)})
        self.norm = nn.Parameter(torch.ones(1))  # empty on most ranks
        with torch.no_grad():
            self.dense.weight.copy_(torch.randn(13, 6, generator=generator) / 3)


def shard_toy(layout: str) -> Toy:
    """ "dual": dense weights HSDP, experts over all ranks; "swapped": the other way round; "fsdp"; "single"."""
    model, world = Toy(), dist.get_world_size()
    if layout == "single":
        return model
    flat = init_device_mesh("cpu", (world,))
    if layout == "fsdp":
        fully_shard(model, mesh=flat)
        return model
    wide = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    dense, expert = (wide, flat) if layout == "dual" else (flat, wide)
    fully_shard(model.experts, mesh=expert)
    fully_shard(model, mesh=dense)
    return model


def toy_grads(model: Toy, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in model.parameters():
        full = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            parameter.grad = lay(full, parameter.device_mesh, list(parameter.placements))
        else:
            parameter.grad = full


def toy_optimizer(model: Toy) -> ShardedMuon:
    return ShardedMuon(model.named_parameters(), lr=0.05, units={"experts*": Experts(rows=4)}, settings=EXACT)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def contents(model: Toy, optimizer: ShardedMuon) -> dict[str, Tensor]:
    """Weights and state, unsharded, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter.detach())
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = whole(value)
    return found


def save_toy(layout: str, folder: str, steps: int) -> dict[str, Tensor]:
    model = shard_toy(layout)
    optimizer = toy_optimizer(model)
    for step in range(steps):
        toy_grads(model, step)
        optimizer.step()
    save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    return contents(model, optimizer)


def load_toy(layout: str, folder: str, start: int, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Contents right after loading, and `steps` steps later."""
    model = shard_toy(layout)
    optimizer = toy_optimizer(model)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    loaded = contents(model, optimizer)
    for step in range(start, start + steps):
        toy_grads(model, step)
        optimizer.step()
    return loaded, contents(model, optimizer)


def refusals() -> dict[str, str]:
    """What a sharded world refuses, and how."""
    world, rank = dist.get_world_size(), dist.get_rank()
    flat, pairs = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    a = nn.Parameter(lay(torch.randn(8, 8), flat, [Shard(0)]))
    b = nn.Parameter(lay(torch.randn(8, 8), pairs, [Replicate(), Shard(0)]))
    plain = nn.Parameter(torch.randn(8, 8))
    shard = local(a.detach())[: chunk(torch.empty(8), world, rank).numel()]
    false = DTensor.from_local(
        shard[:, :3].contiguous(), flat, [Shard(0)], run_check=False, shape=torch.Size((8, 8)), stride=(8, 1)
    )
    partial = DTensor.from_local(torch.randn(8, 8), flat, run_check=False, placements=[Partial()])
    said = {}

    def expect(what: str, act: Any) -> None:
        try:
            act()
            said[what] = "accepted"
        except MuonError as error:
            said[what] = str(error)

    expect("plain among sharded", lambda: ShardedMuon([("a", a), ("lost", plain)], lr=0.1))
    expect("two meshes", lambda: ShardedMuon([("w", a), ("w", b)], lr=0.1))
    tied = nn.Parameter(DTensor.from_local(local(a.detach()), pairs, [Shard(0), Shard(0)], run_check=False))
    expect("tied over two meshes", lambda: ShardedMuon([("a", a), ("tied", tied)], lr=0.1))
    expect("false shard", lambda: ShardedMuon([("w", nn.Parameter(false))], lr=0.1))
    expect("partial", lambda: ShardedMuon([("w", nn.Parameter(partial))], lr=0.1))
    expect("local", lambda: ShardedMuon([("w", a)], lr=0.1, settings=MuonSettings(placement="local")))
    expect(
        "split plain",
        lambda: ShardedMuon([("w", plain)], lr=0.1, settings=MuonSettings(replica_mode="split")),
    )
    expect(
        "other plans",
        lambda: ShardedMuon(
            [("w", a)], lr=0.1, settings=MuonSettings(newton_schulz=NewtonSchulz(steps=5 + rank))
        ),
    )
    # one process and its plain momentum; then the ranks of this world
    alone = ShardedMuon([("w", nn.Parameter(torch.randn(8, 8)))], lr=0.1).state_dict()
    expect("another world saved", lambda: ShardedMuon([("w", a)], lr=0.1).load_state_dict(alone))
    try:
        fully_shard(nn.Linear(7, 8, bias=False), mesh=flat, shard_placement_fn=lambda _: Shard(1))
        said["uneven FSDP"] = "accepted"
    except NotImplementedError as error:
        said["uneven FSDP"] = str(error)
    grad = lay(torch.randn(8, 8), pairs, [Shard(0), Shard(0)])
    other = nn.Parameter(lay(torch.randn(8, 8), flat, [Shard(0)]))
    optimizer = ShardedMuon([("w", other)], lr=0.1)
    try:
        other.grad = grad
    except RuntimeError:
        said["gradient elsewhere"] = "refused by torch"
    else:
        expect("gradient elsewhere", optimizer.step)
    return said
