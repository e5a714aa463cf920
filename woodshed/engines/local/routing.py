"""Choices of a model's routers: which experts each token goes to, told by an engine and replayed by a trainer.

Every family of transformers ends its routing with `topk` over as many scores as a layer has experts, whatever makes
them and whatever becomes of the chosen ones. That call is watched, and answered for replayed tokens: the scores of the
experts are the model's own, and carry gradients (R3, arXiv 2510.11370).

Letters: P tokens, L layers with experts, E experts of a layer, K of them for each token.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

Choose = Callable[[int, int, Tensor, Tensor], Tensor]
"""(number among the layers with experts, experts in what is chosen: 1, or those of a group, scores (P, E), the router's
own choice (P, K)) to the choice (P, K). Some routers choose groups first (DeepSeek-V3, arXiv 2412.19437)."""


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Name to module, for every stack of experts in transformers' form (one 3-D parameter for all experts)."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "num_experts") and hasattr(module, "has_gate")
    }


class Routers:
    """The layers of a model that have experts, and what is done with their routers' choices. See `routers_of`."""

    def __init__(self, model: Any) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        self.numbers = [number for number, layer in enumerate(layers) if find_experts(layer)]
        """Numbers, among all layers, of those with experts."""
        self.num_layers = len(layers)
        config = model.config.get_text_config() if self.numbers else None
        self.each = int(getattr(config, "num_experts_per_tok", None) or 0)
        """Experts of each token."""
        self._groups = tuple(getattr(config, name, None) or 1 for name in ("n_group", "topk_group"))
        self._choose: Choose | None = None
        for place, number in enumerate(self.numbers):
            layer = layers[number]
            (experts, *_) = find_experts(layer).values()
            num_experts = int(experts.num_experts)  # pyright: ignore[reportArgumentType]
            layer.forward = functools.partial(self._forward, layer.forward, place, num_experts)

    def _forward(
        self, forward: Callable[..., Any], place: int, num_experts: int, *args: Any, **options: Any
    ) -> Any:
        if self._choose is None:
            return forward(*args, **options)
        sizes = {(num_experts, self.each): 1, self._groups: num_experts // self._groups[0]}
        with _Selection(functools.partial(self._choose, place), sizes):
            return forward(*args, **options)

    @contextmanager
    def choosing(self, choose: Choose | None) -> Iterator[None]:
        """Let a function see, and change, the choices of the forwards inside."""
        before, self._choose = self._choose, choose
        try:
            yield
        finally:
            self._choose = before

    @contextmanager
    def told(self) -> Iterator[list[Tensor]]:
        """The choices of one forward inside, (P, K) for each layer with experts, in a list that fills."""
        chosen: list[Tensor] = []

        def note(_place: int, size: int, _scores: Tensor, own: Tensor) -> Tensor:
            if size == 1:
                chosen.append(own)
            return own

        with self.choosing(note):
            yield chosen


_KNOWN: weakref.WeakKeyDictionary[nn.Module, Routers] = weakref.WeakKeyDictionary()


def routers_of(model: Any) -> Routers:
    """The routers of a model, which it keeps for as long as it lives: they stand in its layers' forward."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT wraps it
    if inner not in _KNOWN:
        _KNOWN[inner] = Routers(inner)
    return _KNOWN[inner]


class _Selection(TorchFunctionMode):
    """The choices of a router, each a `topk` over a row of scores for every token, with their answers changed.

    Args:
        sizes: (scores of a token, chosen ones) of the choices, to the number of experts in what is chosen.
    """

    def __init__(
        self, choose: Callable[[int, Tensor, Tensor], Tensor], sizes: Mapping[tuple[int, ...], int]
    ) -> None:
        self._choose, self._sizes = choose, sizes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, own = args[0], found[1]
        size = self._sizes.get((scores.shape[-1], own.shape[-1])) if scores.ndim == 2 else None
        if size is None:
            return found
        chosen = self._choose(size, scores, own)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
