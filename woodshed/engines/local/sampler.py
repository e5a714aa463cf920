"""Drawing batches of messages from a model on this machine.

The sampler keeps what it has computed. Keys and values of every finished sequence stay in memory, compactly, so the
next turn's prompt (which begins with that very sequence) costs only its new tokens; the system prompt and the shared
prompt of a group are computed once. While a batch is written, rows that end leave at once and queued ones take their
place, so no step computes a row that is done.

Shapes: B rows, T columns, L layers, H key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from woodshed.engines.local import invariant
from woodshed.engines.local.graphs import Graphs, padded_rows
from woodshed.engines.local.invariant import LEAST_ROWS
from woodshed.engines.local.kv_cache import Prefix, Prefixes, RunningBatch, common_length
from woodshed.engines.sampler import Sample, SampleRequest, SamplerSettings, check_fits
from woodshed.records import ModelError
from woodshed.tokens.renderer import Renderer

_PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}  # in one forward; more fills the device no better
_SHARED_TOKENS = 16  # a shorter common beginning is not worth a forward of its own
_BLOCK = 512  # ids whose probabilities are summed before one of them is looked for


@dataclass
class _Row:
    """One message being written."""

    index: int
    request: SampleRequest
    stream: np.random.Generator
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def done(self) -> bool:
        return self.stopped or len(self.ids) >= self.request.max_tokens

    @property
    def computed(self) -> np.ndarray:
        """The ids whose keys and values are known: all but the last one drawn."""
        return np.array([*self.request.prompt_ids, *self.ids[:-1]])


class LocalSampler:
    """Draws messages from a transformers model, which may be the one in training.

    The same calls in the same order give the same bits. But where `invariant` reaches, what was kept from earlier
    calls changes the order of sums, in the last digit: a run that must repeat exactly begins each phase with `load` or
    `flush`.
    """

    def __init__(self, model: Any, renderer: Renderer, settings: SamplerSettings | None = None) -> None:
        self.settings = settings or SamplerSettings()
        self.renderer = renderer
        self.policy_version = 0
        self.model = model
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT wraps it
        accepted = inspect.signature(inner.forward).parameters
        self._cache_name = (
            "cache" if "cache" in accepted else "past_key_values"
        )  # renamed after transformers 5.17
        config = model.config.get_text_config()
        self.context_length = int(config.max_position_embeddings)
        kinds = set(getattr(config, "layer_types", None) or ())
        if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
            raise ModelError(
                f"the local sampler keeps keys and values only, and {config.model_type} has {', '.join(odd)} layers; "
                "serve it with vLLM and sample through its endpoint"
            )
        self._prefixes = Prefixes(self.settings.cache_mb << 20)
        self._batch = RunningBatch(config.num_hidden_layers)
        self.engine = {
            "name": "transformers",
            "version": transformers.__version__,
            "torch": torch.__version__,
            "device": self.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
        }
        self._takes_spans = invariant.takes_spans(model)  # a window would need a mask of its own
        captured = self._takes_spans and self.device.type == "cuda"
        self._graphs = self._make_graphs() if captured else None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def load(self, policy: Any, version: int) -> None:
        """New weights, or (None) the same model after an update: everything computed before is forgotten."""
        self.model = self.model if policy is None else policy
        self.policy_version = version
        self.flush()

    def flush(self) -> None:
        """Forget all keys and values and free their memory (an update may need it).

        Graphs hold the addresses of the rows that run together: with them, that memory stays.
        """
        self._prefixes.kept.clear()
        if self._graphs is None:
            self._batch.tensors.clear()

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """One sample per request, in order.

        Raises:
            SamplerError: a request does not fit the context.
            ModelError: the model's logits are not finite.
        """
        for request in requests:
            check_fits(request, self.context_length)
        if not requests:
            return []
        streams = [np.random.Generator(np.random.Philox(key=r.seed % 2**64)) for r in requests]
        rows = [_Row(i, r, stream) for i, (r, stream) in enumerate(zip(requests, streams, strict=True))]
        longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        most = min(len(rows), self.settings.max_rows)
        most = padded_rows(most) if self._graphs else most
        self._batch.room = (most, longest + 64)  # 64: rows are seldom moved
        with torch.inference_mode(), _evaluating(self.model), invariant.unsplit():
            prompts = self._prefill(dict.fromkeys(request.prompt_ids for request in requests))
            self._draw(rows, torch.stack([prompts[row.request.prompt_ids][1] for row in rows]))
            self._write([row for row in rows if not row.done], {ids: p for ids, (p, _) in prompts.items()})
        return [
            Sample(tuple(row.ids), tuple(row.logps), "stop" if row.stopped else "length", self.policy_version)
            for row in rows
        ]

    # the prompts

    def _prefill(self, prompts: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[Prefix, Tensor]]:
        """Every prompt's keys and values, and the logits (V,) behind its last token."""
        arrays = [np.array(ids) for ids in prompts]
        self._prefill_shared(arrays)
        # Most new tokens first: rows of one forward have about as many, and padding stays small.
        known = [self._known(ids) for ids in arrays]
        waiting = sorted(range(len(arrays)), key=lambda i: (known[i][1] - len(arrays[i]), -known[i][1], i))
        found = {}
        while waiting:
            most = len(arrays[waiting[0]]) - known[waiting[0]][1]
            room = min(self.settings.max_rows, max(1, _PREFILL_TOKENS[self.device.type] // most))
            group = [i for i in waiting[:room] if len(arrays[i]) - known[i][1] >= 0.75 * most - 8]
            waiting = waiting[len(group) :]
            for i, result in zip(group, self._forward([(arrays[i], *known[i]) for i in group]), strict=True):
                found[tuple(arrays[i].tolist())] = result
        return found

    def _prefill_shared(self, arrays: Sequence[np.ndarray]) -> None:
        """What all prompts begin with (the system message) is computed once, alone."""
        if len(arrays) < 2:
            return
        shared = min(common_length(arrays[0], ids) for ids in arrays[1:])
        if shared - self._known(arrays[0][:shared])[1] >= _SHARED_TOKENS:
            self._forward([(arrays[0][:shared], *self._known(arrays[0][:shared]))])

    def _known(self, ids: np.ndarray) -> tuple[Prefix | None, int]:
        """The longest computed beginning, short of the last token, whose logits are needed."""
        prefix, length = self._prefixes.find(ids)
        return prefix, min(length, len(ids) - 1)

    def _forward(self, rows: Sequence[tuple[np.ndarray, Prefix | None, int]]) -> list[tuple[Prefix, Tensor]]:
        """Complete (ids, kept sequence, how much of it) to the end of the ids, in one forward."""
        batch, new = self._batch, [len(ids) - length for ids, _, length in rows]
        past = max(length for _, _, length in rows)
        width = max(*new, LEAST_ROWS)
        batch.open(past, past + width)
        for _, prefix, length in rows:
            batch.put(prefix, length)
        tokens = torch.zeros((len(rows), width), dtype=torch.long)
        for slot, (ids, _, length) in enumerate(rows):
            tokens[slot, : new[slot]] = torch.from_numpy(ids[length:])
        lasts = sorted({count - 1 for count in new} | set(range(-(-LEAST_ROWS // len(rows)))))
        logits = self._logits(tokens, new, torch.tensor(lasts, device=self.device))
        results = []
        for slot, (ids, _, length) in enumerate(rows):
            prefix = batch.take(slot, ids, past - length)
            self._prefixes.add(prefix)
            results.append((prefix, logits[slot, lasts.index(new[slot] - 1)]))
        return results

    def _logits(self, tokens: Tensor, new: Sequence[int], keep: int | Tensor) -> Tensor:
        """Logits (B, kept, V) in float32 after a forward that writes its keys and values into the batch."""
        batch, width = self._batch, tokens.shape[1]
        seen = batch.spans(self.device) if self._takes_spans else batch.mask(self.device, new, width)
        output = self.model(
            input_ids=tokens.to(self.device),
            attention_mask=seen,
            position_ids=batch.positions(self.device, width).clamp(max=self.context_length - 1),  # padding's
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_name: self._batch},
        )
        return output.logits.float()

    # the messages

    def _write(self, rows: Sequence[_Row], prompts: dict[tuple[int, ...], Prefix]) -> None:
        """Write on until every row is done; queued rows enter as others leave."""
        if not rows:
            return
        queue = deque(sorted(rows, key=lambda row: (-len(row.request.prompt_ids), row.index)))
        batch, live = self._batch, []
        longest = len(queue[0].request.prompt_ids)
        batch.open(longest, longest + 1)
        while queue or live:
            while queue and len(live) < self.settings.max_rows:
                live.append(queue.popleft())
                prompt = live[-1].request.prompt_ids
                batch.put(prompts[prompt], len(prompt))
            batch.make_room(max(*batch.lengths, len(queue[0].request.prompt_ids) if queue else 0))
            self._step(live)
            batch.advance()
            for slot in reversed(range(len(live))):
                if live[slot].done:
                    ids = live[slot].computed
                    self._prefixes.add(batch.take(slot, ids, batch.end - len(ids)))
                    batch.drop(slot)
                    live[slot] = live[-1]
                    live.pop()

    def _step(self, live: Sequence[_Row]) -> None:
        """One more token for each row."""
        tokens = [row.ids[-1] for row in live]
        if self._graphs is None:
            logits = self._logits(torch.tensor(tokens)[:, None], [1] * len(live), 1)
            self._draw(live, logits[:, -1])
        else:
            ids, logps = self._graphs.step(tokens, [row.stream.random() for row in live])
            self._note(live, ids.long(), logps)

    def _draw(self, rows: Sequence[_Row], logits: Tensor) -> None:
        """One token for each row from its logits (B, V)."""
        uniform = torch.tensor(
            [row.stream.random() for row in rows], dtype=torch.float64, device=logits.device
        )
        self._note(rows, *draw(logits, uniform, self.settings.temperature))

    def _note(self, rows: Sequence[_Row], ids: Tensor, logps: Tensor) -> None:
        if not torch.isfinite(logps).all():
            self.flush()
            self._batch.tensors.clear()  # no NaN may stay behind masked columns
            raise ModelError(
                f"the model's logits are not finite at policy version {self.policy_version}: its weights are not "
                f"finite or too large, or the temperature ({self.settings.temperature:g}) is too low. This run cannot "
                "go on with them; begin one under another name, with a lower optimizer.learning_rate"
            )
        for row, token, logp in zip(rows, ids.tolist(), logps.tolist(), strict=True):
            row.ids.append(token)
            row.logps.append(logp)
            row.stopped = token in self.renderer.stop_ids

    def _make_graphs(self) -> Graphs:
        def forward(tokens: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
            output = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: self._batch},
            )
            return output.logits[:, -1].float()

        def choose(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
            return draw(logits, uniform, self.settings.temperature)

        return Graphs(forward, choose, self._batch, self.device)


def draw(logits_BV: Tensor, uniform_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One id for each row and its log-prob, by inverting the distribution function at a number in [0, 1).

    Blocks of ids are summed first, in float64, then the ids of one block. A row takes nothing from its neighbours.
    """
    logps_BV = torch.log_softmax(logits_BV / temperature, dim=-1)
    padding = -logps_BV.shape[-1] % _BLOCK
    prob_BNK = torch.nn.functional.pad(logps_BV.exp(), (0, padding)).unflatten(-1, (-1, _BLOCK))
    edge_BN = prob_BNK.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted_B1 = uniform_B[:, None] * edge_BN[:, -1:]
    block_B1 = _first_above(edge_BN, wanted_B1)
    before_B1 = torch.where(block_B1 > 0, edge_BN.gather(-1, (block_B1 - 1).clamp(min=0)), 0.0)
    prob_BK = prob_BNK.gather(1, block_B1[..., None].expand(-1, 1, _BLOCK))[:, 0]
    ids = block_B1 * _BLOCK + _first_above(prob_BK.double().cumsum(-1), wanted_B1 - before_B1)
    ids = ids.clamp(max=logps_BV.shape[-1] - 1)  # of rows that are not finite
    return ids[:, 0], logps_BV.gather(-1, ids)[:, 0]


def _first_above(rising_BN: Tensor, wanted_B1: Tensor) -> Tensor:
    """(B, 1) where a sum first exceeds what is wanted; rounding asks for no more than there is."""
    most_B1 = torch.nextafter(rising_BN[:, -1:], torch.zeros_like(wanted_B1))
    found = torch.searchsorted(rising_BN, torch.minimum(wanted_B1, most_B1), right=True)
    return found.clamp(max=rising_BN.shape[-1] - 1)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """No dropout while sampling; the mode from before comes back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
