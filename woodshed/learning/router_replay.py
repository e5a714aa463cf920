"""Router replay: the trainer sends tokens to the experts that the engine chose (R3, arXiv 2510.11370).

Engine and trainer compute the same weights with different kernels, and a router whose scores nearly tie picks another
expert: one token of a hundred then has another log-prob altogether. The engine tells its choices, and the trainer takes
them. Their gate scores are the trainer's own, and carry gradients.

A choice that cannot have been the engine's is dropped, and filled from the router's own candidates, best first
(Composer 2 report, arXiv 2603.24477): an expert twice, or one whose score is not among the best `CANDIDATES` times K.
Tokens of which nothing is known are routed as if there was no replay.

Letters: P tokens, L layers, E experts of a layer, K of them for each token, C candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from woodshed.engines.local.routing import Routers

CANDIDATES = 2
"""Times K, the number of a router's best experts that an engine with other kernels may have chosen among."""


@dataclass
class RouterReplay:
    """Replay of logged choices through the routers of a model, and what became of them."""

    routers: Routers
    counts: list[Tensor] = field(default_factory=list)
    """[choices that were logged, those that were dropped] of every layer and forward since they were taken last."""

    @contextmanager
    def of(self, logged_PLK: Tensor | None) -> Iterator[None]:
        """Replay the choices for the tokens of the forwards inside; -1 where nothing is known, None replays nothing."""
        layers = None if logged_PLK is None else self._layers(logged_PLK)
        if logged_PLK is None or layers is None:
            yield
            return

        def choose(place: int, size: int, scores_PE: Tensor, own_PK: Tensor) -> Tensor:
            logged_PK = logged_PLK[:, layers[place]].long()
            if size > 1:
                return refilled(scores_PE.detach(), groups_of(logged_PK, size, own_PK.shape[-1]), own_PK)[0]
            chosen_PK, is_kept_PK = refilled(scores_PE.detach(), logged_PK, own_PK)
            is_known_PK = logged_PK >= 0
            self.counts.append(torch.stack([is_known_PK.sum(), (is_known_PK & ~is_kept_PK).sum()]))
            return chosen_PK

        with self.routers.choosing(choose):
            yield

    def _layers(self, logged_PLK: Tensor) -> list[int] | None:
        """Places of the layers with experts in the log; None where it is of another model."""
        _, num_layers, each = logged_PLK.shape
        if each != self.routers.each:
            return None
        if num_layers == len(self.routers.numbers):
            return list(range(num_layers))
        return self.routers.numbers if num_layers == self.routers.num_layers else None

    def take_counts(self) -> tuple[float, float]:
        """(choices that were logged, those that were dropped) since the last call."""
        total = torch.stack(self.counts).sum(0).tolist() if self.counts else [0, 0]
        self.counts.clear()
        return float(total[0]), float(total[1])


def groups_of(logged_PK: Tensor, size: int, most: int) -> Tensor:
    """(P, most): the groups of so many experts in which the logged ones are, each once, -1 behind them."""
    groups_PK = logged_PK.div(size, rounding_mode="floor").sort(-1, descending=True).values
    is_repeated_PK = torch.cat(
        [groups_PK.new_zeros((len(groups_PK), 1)), groups_PK.diff(dim=-1) == 0], -1
    ).bool()
    return groups_PK.masked_fill(is_repeated_PK, -1).sort(-1, descending=True).values[:, :most]


def refilled(scores_PE: Tensor, logged_PK: Tensor, own_PK: Tensor) -> tuple[Tensor, Tensor]:
    """(the experts to go to (P, K), True where it is the logged one (P, K)).

    Args:
        own_PK: the router's own choice, for tokens of which nothing is left.
    """
    each = own_PK.shape[-1]
    best_PC, candidates_PC = scores_PE.topk(min(CANDIDATES * each, scores_PE.shape[-1]), -1)
    candidates_PC = candidates_PC.masked_fill(best_PC == -torch.inf, -2)  # of a group that was ruled out
    is_candidate_PK = (logged_PK[:, :, None] == candidates_PC[:, None]).any(-1)
    is_repeated_PK = (logged_PK[:, :, None] == logged_PK[:, None]).tril(-1).any(-1)
    is_kept_PK = is_candidate_PK & ~is_repeated_PK
    kept_PK = logged_PK.masked_fill(~is_kept_PK, -1)
    is_taken_PC = (candidates_PC[:, :, None] == kept_PK[:, None]).any(-1)
    free_PC = candidates_PC.gather(-1, is_taken_PC.byte().argsort(dim=-1, stable=True))
    nth_PK = ((~is_kept_PK).cumsum(-1) - 1).clamp(min=0)
    chosen_PK = torch.where(is_kept_PK, logged_PK, free_PC.gather(-1, nth_PK))
    return torch.where(is_kept_PK.any(-1, keepdim=True), chosen_PK, own_PK), is_kept_PK
