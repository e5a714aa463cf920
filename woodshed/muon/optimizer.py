"""Sharded Muon: whole matrices are orthogonalised although every rank stores only shards of them.

Momentum is updated where it is stored, travels to the rank that owns the matrix, is orthogonalised there, and the
update travels back. Equal to Muon on full matrices in one process. Meshes are read from each parameter's DTensor, so
dense and expert weights may lie on different meshes with different numbers of replicas.

Per matrix W with gradient G (Jordan et al. 2024; scale and decay of Moonshot's, arXiv 2502.16982):

    M <- mu M + G;   U = G + mu M;   W <- (1 - lr wd) W - lr s(r, c) NewtonSchulz(U)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_step

from woodshed.muon import layout, planner, runtime
from woodshed.muon.errors import MuonError
from woodshed.muon.gradients import BAD, NONE, everywhere, largest, refuse_nonfinite, unit_status
from woodshed.muon.layout import local
from woodshed.muon.parameters import Parameter, check_layouts, check_saved, choose, spec, split_groups
from woodshed.muon.settings import MuonSettings
from woodshed.muon.units import Units


class ShardedMuon(torch.optim.Optimizer):
    """Muon for matrices, AdamW for the rest, over any mix of FSDP2, HSDP, expert-parallel and plain parameters.

    Every rank of the default process group constructs it and calls `step`. A parameter without a gradient counts as one
    with a gradient of zeros, so ranks never disagree about what to exchange. `plan` says who owns what.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        units: Mapping[str, Units] | None = None,
        adamw: Mapping[str, Any] | None = None,
        settings: MuonSettings | None = None,
    ) -> None:
        """Raises `MuonError` for whatever could not be updated exactly.

        named_parameters: `model.named_parameters()`, or groups of them: dict(params=[(name, p), ...], lr=..., ...).
        lr: of Muon; with the default scale it is on AdamW's.
        weight_decay: decoupled, times the plain lr.
        momentum: mu, the decay of the momentum sum.
        units: pattern of names to Whole(), Heads(...) or Experts(...); the first match counts. Without one, 2-D
            parameters are Whole(), 3-D ones Experts(), 1-D ones go to AdamW.
        adamw: match (patterns of names for AdamW; default embeddings and lm_head), lr, betas, eps, weight_decay.
        """
        self._built = False
        self.settings = settings or MuonSettings()
        self.skipped: Counter[str] = Counter()
        """Parameter name to the number of its units that were left alone because of NaN or Inf."""
        check_rates(lr, weight_decay, momentum)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        groups = split_groups(named_parameters, defaults, units or {}, dict(adamw or {}))
        super().__init__(groups, {"lr": lr})
        muon = [each for each in self.parameters() if each.group["algorithm"] == "muon"]
        self._adamw = [each for each in self.parameters() if each.group["algorithm"] == "adamw"]
        check_layouts([*muon, *self._adamw])
        self._device = local((muon or self._adamw)[0].tensor).device
        self._make_plan(muon, units or {})
        self._prepare_state(muon)
        self._built = True

    def _make_plan(self, muon: list[Parameter], units: Mapping[str, Units]) -> None:
        """Plan the exchanges, the same on every rank, and prepare what carries them out."""
        settings = self.settings
        rules = planner.Rules(
            settings.placement,
            settings.replica_mode,
            max(1, settings.max_inflight_bytes // 3),
            settings.wire_dtype.itemsize,
            settings.newton_schulz.steps,
        )
        specs = [spec(each.name, each.tensor, choose(each.name, each.tensor, units)) for each in muon]
        self.plan = planner.build(specs, rules)
        by_name = {each.name: each for each in muon}
        self._exchanged = [[by_name[s.name] for s in exchange.specs] for exchange in self.plan.exchanges]
        self._runners = [
            runtime.Runner(
                exchange,
                layout.my_rank(),
                [local(each.tensor) for each in exchanged],
                layout.process_group(exchange.members(layout.my_rank()), exchanged[0].tensor),
                settings.newton_schulz,
                settings.wire_dtype,
                settings.max_inflight_bytes,
            )
            for exchange, exchanged in zip(self.plan.exchanges, self._exchanged, strict=True)
        ]
        self._tasks = runtime.schedule(self._runners)
        layout.agree(self.plan.digest, self.plan.describe)

    def parameters(self) -> list[Parameter]:
        """Every parameter with its name and group, Muon's and AdamW's."""
        return [
            Parameter(name, tensor, group)
            for group in self.param_groups
            for name, tensor in zip(group["param_names"], group["params"], strict=True)
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups after construction: the plan covers every parameter."""
        if self._built:
            raise MuonError("parameters cannot be added to a plan; build a new ShardedMuon with all of them.")
        super().add_param_group(param_group)

    def _prepare_state(self, muon: list[Parameter]) -> None:
        """Create all state at once: a checkpoint needs the same keys on every rank, with or without gradients."""
        for each in muon:
            self.state[each.tensor] = {
                "momentum_buffer": torch.zeros_like(each.tensor.detach(), dtype=self.settings.momentum_dtype)
            }
        for each in self._adamw:
            self.state[each.tensor] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(each.tensor.detach()),
                "exp_avg_sq": torch.zeros_like(each.tensor.detach()),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter. Returns what `closure` returned, if given.

        Raises `MuonError` on all ranks, with nothing changed, for NaN or Inf gradients unless told otherwise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [[each.gradient() for each in exchanged] for exchanged in self._exchanged]
        adamw_grads = [each.gradient() for each in self._adamw]
        if self.settings.nonfinite == "raise":
            names = [each.name for exchanged in self._exchanged for each in exchanged] + [
                each.name for each in self._adamw
            ]
            refuse_nonfinite(names, [grad for part in (*grads, adamw_grads) for grad in part], self._device)
        inputs = {
            runner: self._inputs(runner, exchanged, part)
            for runner, exchanged, part in zip(self._runners, self._exchanged, grads, strict=True)
        }
        runtime.run(self._tasks, inputs, self.settings.max_inflight_bytes)
        self._step_adamw(adamw_grads)
        return loss

    def _inputs(
        self, runner: runtime.Runner, exchanged: list[Parameter], grads: list[Tensor | None]
    ) -> runtime.Inputs:
        status = None
        if self.settings.starved != "step" or self.settings.nonfinite == "skip_unit":
            status = unit_status(runner, grads)
        coefficients = {}
        for shard in runner.stored:
            unit = runner.exchange.units[shard.unit]
            group = exchanged[unit.spec].group
            lr = float(group["lr"])
            keep, rate, frozen = (
                1 - lr * group["weight_decay"],
                lr * self.settings.unit_scale(unit.rows, unit.cols),
                False,
            )
            if status is not None and status[shard.unit] == BAD and self.settings.nonfinite == "skip_unit":
                keep, rate, frozen = 1.0, 0.0, True
            elif status is not None and status[shard.unit] == NONE and self.settings.starved != "step":
                keep, rate, frozen = keep if self.settings.starved == "decay_only" else 1.0, 0.0, True
            coefficients[shard.unit] = runtime.Coefficients(group["momentum"], keep, rate, frozen)
        if status is not None and self.settings.nonfinite == "skip_unit":
            for unit, code in zip(runner.exchange.units, status, strict=True):
                if code == BAD:
                    self.skipped[exchanged[unit.spec].name] += 1
        return runtime.Inputs(
            [local(each.tensor) for each in exchanged],
            grads,
            [local(self.state[each.tensor]["momentum_buffer"]) for each in exchanged],
            coefficients,
            self.settings.nesterov,
        )

    def _step_adamw(self, grads: list[Tensor | None]) -> None:
        """AdamW is element-wise, so shards are updated where they are. A rank whose shard is empty counts the step too:
        any rank may be the one that writes the counter into a checkpoint."""
        bad = self._bad_adamw(grads) if self.settings.nonfinite == "skip_unit" else set()
        for group in self.param_groups:
            chosen = [
                (each, grad)
                for each, grad in zip(self._adamw, grads, strict=True)
                if each.group is group and grad is not None and each.name not in bad
            ]
            if not chosen:
                continue
            states = [self.state[each.tensor] for each, _ in chosen]
            adamw_step(
                [local(each.tensor) for each, _ in chosen],
                [grad for _, grad in chosen],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _bad_adamw(self, grads: list[Tensor | None]) -> set[str]:
        """Names of AdamW's parameters that have NaN or Inf in any shard."""
        if not self._adamw:
            return set()
        bad = torch.zeros(len(grads), dtype=torch.uint8, device=self._device)
        present = [(index, grad) for index, grad in enumerate(grads) if grad is not None and grad.numel()]
        if present:
            finite = torch.isfinite(largest([grad for _, grad in present]))
            bad[torch.tensor([index for index, _ in present], device=self._device)] = (~finite).to(
                torch.uint8
            )
        bad = everywhere(bad)
        names = {each.name for each, flag in zip(self._adamw, bad.tolist(), strict=True) if flag}
        self.skipped.update(names)
        return names

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """State of the same parameters in the same layout. For another number of ranks or another layout, use
        `torch.distributed.checkpoint` with `get_optimizer_state_dict` and `set_optimizer_state_dict`, which reshard.

        Raises `MuonError`, with nothing changed, if a saved momentum is laid out differently from its parameter.
        """
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        ours = self.parameters()
        for each, index in zip(ours, saved, strict=False):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    check_saved(each, key, value)
        super().load_state_dict(state_dict)
        # It also replaces the group dictionaries, so settings would be read from old ones.
        groups = {id(tensor): group for group in self.param_groups for tensor in group["params"]}
        for each in (*self._adamw, *(each for exchanged in self._exchanged for each in exchanged)):
            each.group = groups[id(each.tensor)]
        # The base class casts state to the parameter's type, where momentum keeps its own, and shares its memory.
        for each, index in zip(self.parameters(), saved, strict=True):
            value = state_dict["state"].get(index, {}).get("momentum_buffer")
            if value is not None:
                buffer = torch.zeros_like(each.tensor.detach(), dtype=self.settings.momentum_dtype)
                local(buffer).copy_(local(value))
                self.state[each.tensor]["momentum_buffer"] = buffer
            else:
                state = self.state[each.tensor]
                state |= {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}


def check_rates(lr: float, weight_decay: float, momentum: float) -> None:
    if not float(lr) >= 0 or not weight_decay >= 0:
        raise MuonError(f"lr={lr}, weight_decay={weight_decay}: neither may be negative.")
    if not 0 <= momentum < 1:
        raise MuonError(f"momentum={momentum}: pass a value in [0, 1); 0.95 is usual.")
