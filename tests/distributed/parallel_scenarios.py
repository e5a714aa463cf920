"""What ranks do in the tests of `test_parallel_distributed.py`; every function runs on all ranks of a world."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import ROWS, build, optimizer_of, read, train, weights, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from woodshed.learning.policy import add_adapter
from woodshed.parallel import ParallelLayout
from woodshed.records import LayoutError


@dataclass(frozen=True)
class Case:
    """A model, how it is laid over the ranks, and how it is trained."""

    family: str
    dense: dict[str, int]
    expert: dict[str, int] | None = None
    optimizer: str = "muon"
    packed: bool = False
    checkpointing: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def layout(self) -> ParallelLayout:
        return ParallelLayout.build(dist.get_world_size(), self.dense, self.expert)


def run_cases(cases: dict[str, Case], is_parallel: bool) -> dict[str, Any]:
    """Five steps of each case in this world, or in a single process."""
    found = {}
    for name, case in cases.items():
        model, layout = build(case.family, **case.settings), None
        if is_parallel:
            if case.checkpointing:
                model.activation_checkpointing_enable()
            layout = case.layout()
            layout.apply(model)
        curves = train(model, optimizer_of(case.optimizer, model), layout, range(5), case.packed)
        found[name] = {**curves, "weights": weights(model), "placements": placements(model)}
    return found


def placements(model: nn.Module) -> dict[str, str]:
    return {
        name: f"{each.placements} on {tuple(each.device_mesh.shape)}"
        for name, each in model.named_parameters()
        if isinstance(each, DTensor)
    }


# Checkpoints ------------------------------------------------------------------------------------------------------


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and state, unsharded, by name."""
    found = weights(model)
    for name, parameter in model.named_parameters():
        found |= {f"{name}, {key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return found


def save_after(case: Case, folder: str, steps: int) -> dict[str, Tensor]:
    model, layout = build(case.family), case.layout()
    layout.apply(model)
    optimizer = optimizer_of(case.optimizer, model)
    train(model, optimizer, layout, range(steps), case.packed)
    save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    return contents(model, optimizer)


def load_and_go_on(case: Case, folder: str, steps: range) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Contents right after loading and weights some steps later. The model starts without weights."""
    with torch.device("meta"):
        model = build(case.family)
    rotary = build(case.family).model.rotary_emb
    layout = case.layout()
    layout.apply(model)
    model.to_empty(device="cpu")
    model.model.rotary_emb = rotary  # not part of a checkpoint
    optimizer = optimizer_of(case.optimizer, model)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    loaded = contents(model, optimizer)
    train(model, optimizer, layout, steps, case.packed)
    return loaded, weights(model)


# Smaller things ---------------------------------------------------------------------------------------------------


def low_precision() -> dict[str, Any]:
    """One batch, computed in float32 and in bfloat16."""
    return {str(dtype): one_batch(dtype) for dtype in (None, torch.bfloat16)}


def one_batch(dtype: torch.dtype | None) -> dict[str, Any]:
    """Its loss, and in which precision weights are gathered, stored and reduced."""
    model = build("deepseek")
    layout = ParallelLayout.build(2, dict(cp=2), dict(ep=2))
    layout.apply(model, compute_dtype=dtype)
    seen: dict[str, str] = {}

    def note(name: str, module: nn.Module, *_: Any) -> None:
        seen[name.rpartition(".")[2]] = str(next(module.parameters()).dtype)

    for name, module in model.named_modules():
        if name.endswith((".gate", ".experts", ".q_a_proj")):
            module.register_forward_pre_hook(functools.partial(note, name))
    batch = read(0, False)
    loss = model(**layout.split(batch["input_ids"], batch["labels"])).loss
    loss.backward()
    dist.all_reduce(total := loss.detach().float())
    return {
        "loss": total.item(),
        "gathered": seen,
        "stored": {str(each.dtype) for each in model.parameters()},
        "gradients": {str(each.grad.dtype) for each in model.parameters() if each.grad is not None},
    }


def nothing_arrives() -> dict[str, Any]:
    """All tokens choose the experts of rank 0; the other ranks' experts get gradients of zero."""
    model = build("deepseek")
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias[:4] = 100.0
            module.num_group = module.topk_group = 1
    layout = ParallelLayout.build(4, dict(shard=4), dict(ep=4))
    layout.apply(model)
    batch = {key: value[layout.reader :: ROWS] for key, value in read(0, False).items()}
    model(**layout.split(batch["input_ids"], batch["labels"])).loss.backward()
    grads = [each.grad for name, each in model.named_parameters() if ".experts." in name]
    return {"largest": [grad._local_tensor.abs().max().item() for grad in grads]}


def refusals() -> dict[str, str]:
    """What two ranks refuse, and how."""
    layout = ParallelLayout.build(2, dict(cp=2), dict(ep=2))
    plain = ParallelLayout.build(2, dict(shard=2))
    said: dict[str, str] = {}

    def expect(what: str, act: Callable[[], Any]) -> None:
        try:
            act()
            said[what] = "accepted"
        except LayoutError as error:
            said[what] = str(error)

    expect("world", lambda: ParallelLayout.build(4, dict(shard=4)).apply(build("llama")))
    expect("no transformers model", lambda: plain.apply(nn.Linear(2, 2)))
    expect("no experts", lambda: layout.apply(build("llama")))
    expect("experts", lambda: layout.apply(build("qwen", num_experts=15)))
    expect("adapter of experts", lambda: plain.apply(add_adapter(build("qwen"), 2)))
    expect("balancing loss", lambda: layout.apply(build("qwen", output_router_logits=True)))
    expect("layers", lambda: layout.apply(build("qwen", layer_types=["full_attention", "linear_attention"])))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    cut = ParallelLayout.build(2, dict(cp=2))
    expect("rotary", lambda: cut.apply(build("llama", rope_parameters=rope)))
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight[3] += dist.get_rank()
    expect("seeds", lambda: plain.apply(model))
    model = build("llama")
    cut.apply(model)
    expect("twice", lambda: cut.apply(model))
    ids = read(0, False)["input_ids"]
    expect("length", lambda: cut.split(ids[:, :14], ids[:, :14]))
    expect("nothing to read", lambda: cut.split(ids[:0], ids[:0]))
    expect("not split", lambda: model(ids))
    batch = cut.split(ids, ids)
    expect("mask", lambda: model(**batch, attention_mask=torch.ones(ROWS, 1, 8, 8, dtype=torch.bool)))
    return said
