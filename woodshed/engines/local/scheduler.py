"""Continuous batching: requests are admitted at any step, and finished rows leave at once.

A step admits waiting rows (it prefills their prompts, common beginnings once, and samples each first token) and samples
one more token for every running row. Keys and values of finished sequences stay in memory, so the prompt of the next
turn, which begins with such a sequence, only costs its new tokens.

Shapes: B rows, T columns, V vocabulary.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from woodshed.engines import expert_log
from woodshed.engines.engine import Sample, SampleRequest, SamplerSettings, Versions
from woodshed.engines.local import invariant
from woodshed.engines.local.draw import draw
from woodshed.engines.local.graphs import Graphs, padded_rows
from woodshed.engines.local.invariant import LEAST_ROWS
from woodshed.engines.local.kv_cache import Prefix, Prefixes, RunningBatch, common_length
from woodshed.engines.local.routing import routers_of
from woodshed.records import ModelError
from woodshed.tokens.renderer import Renderer

_PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}  # in one forward; more does not use the device better
_SHARED_TOKENS = 16  # a shorter common beginning is not worth another forward
_MARGIN = 64  # spare columns, so that rows are rarely moved


@dataclass(eq=False)
class BatchRow:
    """One unfinished message."""

    request: SampleRequest
    stop_ids: frozenset[int]
    future: Future[Sample] = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    """Experts of the tokens that were read, in parts; see `Prefix.experts`."""
    prefix: Prefix | None = None
    """Cached keys and values at admission, until the row runs."""

    def __post_init__(self) -> None:
        self.stream = np.random.Generator(np.random.Philox(key=self.request.seed % 2**64))

    @property
    def stopped(self) -> bool:
        return bool(self.ids) and self.ids[-1] in self.stop_ids

    @property
    def done(self) -> bool:
        return self.stopped or len(self.ids) >= self.request.max_tokens or self.future.cancelled()

    @property
    def sequence(self) -> tuple[int, ...]:
        """Ids of the prompt and the message so far."""
        return (*self.request.prompt_ids, *self.ids)

    @property
    def most_columns(self) -> int:
        return len(self.request.prompt_ids) + self.request.max_tokens

    def sample(self) -> Sample:
        """The message."""
        spans: list[list[int]] = []
        for version in self.versions:
            if spans and spans[-1][0] == version:
                spans[-1][1] += 1
            else:
                spans.append([version, 1])
        versions: Versions = tuple((version, count) for version, count in spans)
        reason = "stop" if self.stopped else "length"
        experts = expert_log.write(0, np.concatenate(self.experts)) if self.experts else None
        return Sample(tuple(self.ids), tuple(self.logps), reason, versions, experts)


class Scheduler:
    """The running rows of one model, the waiting rows, and the cache of finished sequences.

    The same calls in the same order give the same bits. Cached sequences change the order of sums, and so the last
    digit, except where `invariant` applies; a run that must be repeatable calls `flush` at the beginning of each phase.
    """

    def __init__(
        self, model: Any, renderer: Renderer, settings: SamplerSettings, *, tells_experts: bool = False
    ) -> None:
        self._tells_experts = tells_experts
        self._chosen: np.ndarray | None = None
        """Experts of the newest forward's tokens, (B, T, ...) as in `Prefix.experts`."""
        self.model, self.renderer, self.settings = model, renderer, settings
        self.version = 0
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT wraps it
        accepted = inspect.signature(inner.forward).parameters
        self._cache_name = (
            "cache" if "cache" in accepted else "past_key_values"
        )  # renamed after transformers 5.17
        config = model.config.get_text_config()
        self.context_length = int(config.max_position_embeddings)
        self._prefixes = Prefixes(self.settings.cache_mb << 20)
        self._prefill_batch = RunningBatch(config.num_hidden_layers)
        self._batch = RunningBatch(config.num_hidden_layers)
        self._waiting: deque[BatchRow] = deque()
        self._running: list[BatchRow] = []
        self._done: list[BatchRow] = []
        self._takes_spans = invariant.takes_spans(model)  # a sliding window would need another mask
        captured = self._takes_spans and self.device.type == "cuda" and not tells_experts
        self._graphs = self._make_graphs() if captured else None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._running)

    def flush(self) -> None:
        """Drop the keys and values of finished sequences and free their memory, which an update may need.

        With captured graphs the memory of the running batch is kept, since they contain its addresses.
        """
        self._prefixes.kept.clear()
        if self.is_idle:
            self._prefill_batch.tensors.clear()
            if self._graphs is None:
                self._batch.tensors.clear()

    def restart(self, model: Any, version: int) -> None:
        """Continue with other weights. Cached keys and values are dropped, so running rows are admitted again with
        their tokens so far."""
        self.model, self.version = model, version
        self._waiting.extendleft(reversed(self._running))
        for row in self._waiting:
            row.prefix = None
        self._running.clear()
        self._batch.open(0, 0)
        self.flush()

    def cut(self) -> list[BatchRow]:
        """Stop all rows at the tokens that they have, and return those that `step` has not returned."""
        rows = list(dict.fromkeys([*self._done, *self._running, *self._waiting]))
        self._done.clear()
        self._running.clear()
        self._waiting.clear()
        for batch in (self._batch, self._prefill_batch):
            batch.open(0, 0)
        self.flush()
        return rows

    def abandon(self) -> list[BatchRow]:
        """As `cut`, after an error. All memory is freed, since it may contain NaN."""
        rows = self.cut()
        for batch in (self._batch, self._prefill_batch):
            batch.tensors.clear()
        return rows

    def add(self, rows: Iterable[BatchRow]) -> None:
        """Queue rows; they are admitted in this order."""
        self._waiting.extend(rows)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context in which `step` must be called; it can be shared by many steps."""
        with torch.inference_mode(), _evaluating(self.model), invariant.unsplit():
            yield

    def step(self) -> list[BatchRow]:
        """Admit waiting rows, sample a token for every running row, and return the finished rows.

        Raises:
            ModelError: the model's logits are not finite.
        """
        self._done += self._admit()
        if self._running:
            self._decode()
            self._done += self._retire()
        done, self._done = self._done, []
        return done

    # admission

    def _admit(self) -> list[BatchRow]:
        """Prefill as many waiting rows as fit and sample their next token; return the finished ones."""
        free = self.settings.max_rows - len(self._running)
        arrived = list(itertools.islice(self._waiting, free))
        if rows := [row for row in arrived if not row.done]:
            prompts = self._prefill(dict.fromkeys(row.sequence for row in rows))
            results = [prompts[row.sequence] for row in rows]
            for row, (prefix, _) in zip(rows, results, strict=True):
                row.prefix = prefix
                row.experts = [] if prefix.experts is None else [prefix.experts]
            self._draw(rows, torch.stack([logits for _, logits in results]))
            self._start([row for row in rows if not row.done])
        for _ in arrived:  # after an error they are still waiting
            self._waiting.popleft()
        return [row for row in arrived if row.done]

    def _start(self, rows: Sequence[BatchRow]) -> None:
        """Add rows to the running batch, the longest first, so that the others fit."""
        if not rows:
            return
        all_rows = [*self._running, *rows]
        num_rows = padded_rows(len(all_rows)) if self._graphs else len(all_rows)
        self._batch.room = (num_rows, max(row.most_columns for row in all_rows) + _MARGIN)
        for row in sorted(rows, key=lambda row: -len(row.sequence)):
            assert row.prefix is not None
            self._batch.make_room_for(len(row.prefix.ids))
            self._batch.insert(row.prefix, len(row.prefix.ids))
            row.prefix = None
            self._running.append(row)

    # prefill

    def _prefill(self, prompts: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[Prefix, Tensor]]:
        """Keys and values of every prompt, and the logits (V,) after its last token."""
        arrays = [np.array(ids) for ids in prompts]
        self._prefill_shared(arrays)
        # Sorted by new tokens, so that the rows of one forward have similar numbers and little padding.
        cached = [self._known(ids) for ids in arrays]
        waiting = sorted(range(len(arrays)), key=lambda i: (cached[i][1] - len(arrays[i]), -cached[i][1], i))
        results = {}
        while waiting:
            num_new = len(arrays[waiting[0]]) - cached[waiting[0]][1]
            room = min(self.settings.max_rows, max(1, _PREFILL_TOKENS[self.device.type] // num_new))
            group = [i for i in waiting[:room] if len(arrays[i]) - cached[i][1] >= 0.75 * num_new - 8]
            waiting = waiting[len(group) :]
            for i, result in zip(group, self._forward([(arrays[i], *cached[i]) for i in group]), strict=True):
                results[tuple(arrays[i].tolist())] = result
        return results

    def _prefill_shared(self, arrays: Sequence[np.ndarray]) -> None:
        """Compute the common beginning of all prompts (the system message) once."""
        if len(arrays) < 2:
            return
        shared = min(common_length(arrays[0], ids) for ids in arrays[1:])
        if shared - self._known(arrays[0][:shared])[1] >= _SHARED_TOKENS:
            self._forward([(arrays[0][:shared], *self._known(arrays[0][:shared]))])

    def _known(self, ids: np.ndarray) -> tuple[Prefix | None, int]:
        """The longest cached beginning, without the last token, whose logits are needed."""
        prefix, length = self._prefixes.find(ids)
        return prefix, min(length, len(ids) - 1)

    def _forward(self, rows: Sequence[tuple[np.ndarray, Prefix | None, int]]) -> list[tuple[Prefix, Tensor]]:
        """Compute rows of (ids, cached sequence, length of its used beginning) to the end of the ids, in one
        forward."""
        batch = self._prefill_batch if self._running else self._batch  # idle, and already allocated
        new = [len(ids) - length for ids, _, length in rows]
        past = max(length for _, _, length in rows)
        width = max(*new, LEAST_ROWS)
        batch.room = (max(batch.room[0], len(rows)), batch.room[1])
        batch.open(past, past + width)
        for _, prefix, length in rows:
            batch.insert(prefix, length)
        tokens = torch.zeros((len(rows), width), dtype=torch.long)
        for slot, (ids, _, length) in enumerate(rows):
            tokens[slot, : new[slot]] = torch.from_numpy(ids[length:])
        lasts = sorted({count - 1 for count in new} | set(range(-(-LEAST_ROWS // len(rows)))))
        logits = self._logits(batch, tokens, new, torch.tensor(lasts, device=self.device))
        results = []
        for slot, (ids, known, length) in enumerate(rows):
            prefix = batch.extract(slot, ids, past - length)
            if self._chosen is not None:
                before = [] if known is None or known.experts is None else [known.experts[:length]]
                experts = np.concatenate([*before, self._chosen[slot, : new[slot]]])
                prefix = replace(prefix, experts=experts)
            self._prefixes.add(prefix)
            results.append((prefix, logits[slot, lasts.index(new[slot] - 1)]))
        batch.open(0, 0)
        return results

    def _logits(self, batch: RunningBatch, tokens: Tensor, new: Sequence[int], keep: int | Tensor) -> Tensor:
        """Logits (B, kept, V) in float32 after a forward that writes its keys and values into the batch."""
        width = tokens.shape[1]
        mask = batch.spans(self.device) if self._takes_spans else batch.mask(self.device, new, width)
        with routers_of(self.model).told() if self._tells_experts else nullcontext([]) as chosen:
            output = self.model(
                input_ids=tokens.to(self.device),
                attention_mask=mask,
                position_ids=batch.positions(self.device, width).clamp(
                    max=self.context_length - 1
                ),  # padding's
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_name: batch},
            )
        if chosen:
            self._chosen = torch.stack(chosen, 1).unflatten(0, tokens.shape).to("cpu", torch.int32).numpy()
        return output.logits.float()

    # sampling

    def _decode(self) -> None:
        """Sample one more token for each running row."""
        rows = self._running
        self._batch.make_room_for(max(self._batch.lengths))
        tokens = [row.ids[-1] for row in rows]
        if self._graphs is None:
            logits = self._logits(self._batch, torch.tensor(tokens)[:, None], [1] * len(rows), 1)
            self._draw(rows, logits[:, -1])
            for row, chosen in zip(rows, self._chosen if self._chosen is not None else (), strict=False):
                row.experts.append(chosen)
        else:
            ids, logps = self._graphs.step(tokens, [row.stream.random() for row in rows])
            self._note(rows, ids.long(), logps)
        self._batch.advance()

    def _retire(self) -> list[BatchRow]:
        """Remove the finished rows from the batch, and cache their keys and values."""
        batch, running, done = self._batch, self._running, []
        for slot in reversed(range(len(running))):
            if running[slot].done:
                ids = np.array(running[slot].sequence[:-1])  # the last id has no keys and values yet
                prefix = batch.extract(slot, ids, batch.end - len(ids))
                experts = np.concatenate(running[slot].experts) if running[slot].experts else None
                self._prefixes.add(replace(prefix, experts=experts))
                batch.remove(slot)
                done.append(running[slot])
                running[slot] = running[-1]
                running.pop()
        return done

    def _draw(self, rows: Sequence[BatchRow], logits: Tensor) -> None:
        """Sample one token for each row from its logits (B, V)."""
        uniform = torch.tensor(
            [row.stream.random() for row in rows], dtype=torch.float64, device=logits.device
        )
        self._note(rows, *draw(logits, uniform, self.settings.temperature))

    def _note(self, rows: Sequence[BatchRow], ids: Tensor, logps: Tensor) -> None:
        if not torch.isfinite(logps).all():
            raise ModelError(
                f"the model's logits are not finite at policy version {self.version}: its weights are not finite or "
                f"too large, or the temperature ({self.settings.temperature:g}) is too low. This run cannot continue "
                "with them; start one with another name and a lower optimizer.learning_rate"
            )
        for row, token, logp in zip(rows, ids.tolist(), logps.tolist(), strict=True):
            row.ids.append(token)
            row.logps.append(logp)
            row.versions.append(self.version)

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


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode, without dropout; restores the mode afterwards."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
