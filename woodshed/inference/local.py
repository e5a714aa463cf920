"""Models on this machine: loading them, and drawing batches of messages from them.

The sampler keeps what it has computed. Keys and values of every finished sequence stay in memory, compactly, so the
next turn's prompt (which begins with that very sequence) costs only its new tokens; the system prompt and the shared
prompt of a group are computed once. While a batch is written, rows that end leave at once and queued ones take their
place, so no step computes a row that is done.

Shapes: B rows, T columns, L layers, H key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import tempfile
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from woodshed.inference.renderer import Renderer
from woodshed.inference.sampler import Sample, SampleRequest, SamplerSettings, check_fits
from woodshed.inference.weights import ModelSource, models_dir, publish, resolve
from woodshed.records import ModelError, SamplerError

# --- loading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory, on the CPU, in evaluation mode."""

    model: Any
    tokenizer: Any
    directory: Path
    """The Hugging Face folder it was read from."""


def load(
    spec: str, *, dtype: str = "float32", adapter: Path | None = None, cache: Path | None = None
) -> LoadedModel:
    """Weights and tokenizer from any specification of `inference.weights`, with an unmerged PEFT adapter on top.

    A GGUF file is dequantised once, to bfloat16 safetensors in the cache, so that every machine and every precision
    starts from the same numbers.

    Raises:
        ModelError: weights, tokenizer or adapter that cannot be found, verified or read; names the file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = resolve(spec, cache)
    directory = _dequantised(source, models_dir(cache)) if source.gguf else source.directory
    with _quiet(), _explained(directory, "folder"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), output_loading_info=True, local_files_only=True
        )
        model, info = loaded
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if missing := sorted(info["missing_keys"]):
        # transformers would fill them with random numbers and go on
        raise ModelError(f"{directory}: {len(missing)} weights are missing, {missing[0]!r} among them")
    model.eval()
    _share_heads(model)
    if adapter is not None:
        model = _with_adapter(model, adapter)
    return LoadedModel(model, tokenizer, directory)


def _share_heads(model: Any) -> None:
    """Let attention read each key and value head once for all query heads that share it, when one token is drawn.

    transformers copies keys and values for every query head, which costs as much as reading the weights when a batch
    is decoded on a CPU. The query heads of one group attend with the same mask, so they can stand side by side as
    positions of one query instead; the sums are the same.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        rows, heads, length, width = query.shape
        groups = key.shape[1]
        if length > 1 or heads == groups or options.get("dropout"):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        seen = torch.nn.functional.scaled_dot_product_attention(
            query.view(rows, groups, heads // groups, width),
            key,
            value,
            attn_mask=None if attention_mask is None else attention_mask[..., : key.shape[2]],
            scale=options.get("scaling"),
        )
        return seen.reshape(rows, 1, heads, width), None

    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register("sdpa_shared_heads", attend)
        AttentionMaskInterface.register("sdpa_shared_heads", sdpa_mask)
        model.set_attn_implementation("sdpa_shared_heads")


def _with_adapter(model: Any, adapter: Path) -> Any:
    from peft import PeftModel

    if not (adapter / "adapter_config.json").is_file():
        raise ModelError(f"{adapter} is not a PEFT adapter: it holds no adapter_config.json")
    with _quiet(), _explained(adapter, "adapter"), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=FutureWarning
        )  # peft calls names that transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        return PeftModel.from_pretrained(model, str(adapter)).eval()


def _dequantised(source: ModelSource, models: Path) -> Path:
    """The Hugging Face folder made from a GGUF file, once; safe when two processes make it at the same time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    assert source.gguf is not None
    path = source.directory / source.gguf
    stat = path.stat()
    identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    final = models / f"{path.stem}-bf16-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if final.is_dir():
        return final
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=".converting-") as temporary:
        with _quiet(), _explained(path, "GGUF file"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.directory,
                gguf_file=source.gguf,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
                output_loading_info=True,
            )
            model, info = loaded
            tokenizer = AutoTokenizer.from_pretrained(source.directory, gguf_file=source.gguf)
            for name in (
                "bos",
                "eos",
                "pad",
            ):  # transformers 5.17 reads the tokenizer's own wrongly from GGUF
                if (token := getattr(model.config, f"{name}_token_id", None)) is not None:
                    setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
            if info["missing_keys"]:
                raise ModelError(
                    f"{path}: weights are missing, {sorted(info['missing_keys'])[0]!r} among them"
                )
            made = Path(temporary) / "made"
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
        publish(made, final)
    return final


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no chatter from libraries; whoever called shows progress."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the GGUF reader draws a bar of its own
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Whatever a loader raises on bad input, as a ModelError that names the file."""
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # loaders raise a different type for every way a file can be wrong
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{path}: this {what} cannot be loaded: {reason}") from error


# --- keys and values --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prefix:
    """A sequence with its keys and its values, each (L, H, T, D)."""

    ids: np.ndarray
    tensors: tuple[Tensor, Tensor]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class _Prefixes:
    """Sequences computed under the current weights, least recently used first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.kept: list[_Prefix] = []

    def find(self, ids: np.ndarray) -> tuple[_Prefix | None, int]:
        """The kept sequence that shares the longest beginning with `ids`, and how long that is."""
        best, length = None, 0
        for prefix in self.kept:
            if (shared := common_length(prefix.ids, ids)) > length:
                best, length = prefix, shared
        if best is not None:
            self.kept.sort(key=lambda prefix: prefix is best)  # stable: only moves it to the end
        return best, length

    def add(self, new: _Prefix) -> None:
        """Keep a sequence instead of its own beginnings, and forget old ones beyond the limit."""
        self.kept = [p for p in self.kept if common_length(p.ids, new.ids) < len(p.ids)]
        self.kept.append(new)
        while sum(p.size_bytes for p in self.kept) > self.limit_bytes:
            self.kept.pop(0)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many ids two sequences share at their beginning."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


class _Layer(CacheLayerMixin):
    """One layer of a `_Batch`, as transformers asks for it."""

    is_sliding = False  # all columns are kept; the model's mask knows its window

    def __init__(self, batch: _Batch, index: int) -> None:
        super().__init__()
        self.batch, self.index = batch, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.batch.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.batch.end - self.batch.start

    def get_max_length(self) -> int:
        return -1


class _Batch(Cache):
    """Keys and values of the rows that run together, each (L, B, H, T, D), written in place.

    Rows end at the same column `end` and begin where their length says, so a step writes one column. The first
    `len(lengths)` rows are live; `start` is where the longest of them begins. Memory is kept from call to call and
    starts as zeros, since a masked column still takes part in sums, with weight zero.
    """

    COLUMN_STEP = 256  # prompts grow a little from turn to turn; the memory grows less often

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(num_layers)])
        self.tensors: list[Tensor] = []
        self.room: tuple[int, int] = (0, 0)  # rows and columns that the current call needs
        self.lengths: list[int] = []
        self.start = self.end = 0

    def open(self, end: int, least_columns: int) -> None:
        """Empty; the first free column is `end`."""
        self.room = (self.room[0], max(self.room[1], least_columns))
        self.lengths = []
        self.start = self.end = end

    def put(self, prefix: _Prefix | None, length: int) -> None:
        """Add a row that begins with the first `length` positions of a kept sequence."""
        if prefix is not None:
            slot, columns = len(self.lengths), slice(self.end - length, self.end)
            for all_rows, kept in zip(self._memory(prefix.tensors), prefix.tensors, strict=True):
                all_rows[:, slot, :, columns] = kept[:, :, :length]
        self.lengths.append(length)
        self.start = self.end - max(self.lengths)

    def write(self, layer: int, *new: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, H, T, D) of one layer; returns all columns of its live rows."""
        rows, end = len(self.lengths), self.end + new[0].shape[2]
        keys, values = (tensor[layer, :rows] for tensor in self._memory(new))
        keys[:, :, self.end : end], values[:, :, self.end : end] = new
        return keys[:, :, self.start : end], values[:, :, self.start : end]

    def _memory(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Keys and values, allocated at the first ones seen (..., H, T, D), which know the shapes."""
        rows, columns = self.room
        if not self.tensors or self.tensors[0].shape[1] < rows or self.tensors[0].shape[3] < columns:
            self.tensors = []  # free before allocating
            columns = -(-columns // self.COLUMN_STEP) * self.COLUMN_STEP
            self.tensors = [
                part.new_zeros((len(self.layers), rows, part.shape[-3], columns, part.shape[-1]))
                for part in like
            ]
        return self.tensors

    def mask(self, device: torch.device, new: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(attention mask (B, T), positions (B, new T)) for a forward that adds `new` tokens to each row.

        Rows with fewer new tokens than the most are padded at the right.
        """
        past, added = self.end - self.start, max(new)
        columns = torch.arange(past + added, device=device)
        lengths = torch.tensor(self.lengths, device=device)[:, None]
        wanted = torch.tensor(new, device=device)[:, None]
        mask = (columns >= past - lengths) & (columns < past + wanted)
        return mask, lengths + torch.arange(added, device=device)

    def advance(self) -> None:
        """One column was written for every row."""
        self.end += 1
        self.lengths = [length + 1 for length in self.lengths]

    def take(self, slot: int, ids: np.ndarray, begin: int) -> _Prefix:
        """A compact copy of one row, whose first column is `begin`."""
        keys, values = (tensor[:, slot, :, begin : begin + len(ids)].clone() for tensor in self.tensors)
        return _Prefix(ids, (keys, values))

    def drop(self, slot: int) -> None:
        """Remove a row; the last one moves into its place."""
        last, length = len(self.lengths) - 1, self.lengths.pop()
        if slot != last:
            for tensor in self.tensors:
                tensor[:, slot, :, self.end - length : self.end] = tensor[
                    :, last, :, self.end - length : self.end
                ]
            self.lengths[slot] = length
        self.start = self.end - max(self.lengths, default=0)

    def make_room(self, end: int) -> None:
        """Where the columns are used up, move the live rows back so that they end at `end`."""
        if self.end < self.tensors[0].shape[3]:
            return
        begin = end - (self.end - self.start)
        for tensor in self.tensors:
            for slot in range(len(self.lengths)):  # one by one: the ranges may overlap, and a copy is made
                tensor[:, slot, :, begin:end] = tensor[:, slot, :, self.start : self.end].clone()
        self.start, self.end = begin, end


# --- sampling ---------------------------------------------------------------------------------------------------

_PREFILL_TOKENS = 2048  # in one forward; more fills neither a CPU nor a GPU better
_SHARED_TOKENS = 16  # a shorter common beginning is not worth a forward of its own


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

    The same calls in the same order give the same bits. What was kept from earlier calls changes the order of sums,
    in the last digit: a run that must repeat exactly begins each phase with `load` or `flush`.
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
        self._prefixes = _Prefixes(self.settings.cache_mb << 20)
        self._batch = _Batch(config.num_hidden_layers)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def load(self, policy: Any, version: int) -> None:
        """New weights, or (None) the same model after an update: everything computed before is forgotten."""
        self.model = self.model if policy is None else policy
        self.policy_version = version
        self.flush()

    def flush(self) -> None:
        """Forget all keys and values and free their memory (an update may need it)."""
        self._prefixes.kept.clear()
        self._batch.tensors.clear()

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """One sample per request, in order.

        Raises:
            SamplerError: a request does not fit the context, or the model's logits are not finite.
        """
        for request in requests:
            check_fits(request, self.context_length)
        if not requests:
            return []
        streams = [np.random.Generator(np.random.Philox(key=r.seed % 2**64)) for r in requests]
        rows = [_Row(i, r, stream) for i, (r, stream) in enumerate(zip(requests, streams, strict=True))]
        longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        self._batch.room = (min(len(rows), self.settings.max_rows), longest + 64)  # 64: rows are seldom moved
        with torch.inference_mode(), _evaluating(self.model):
            prompts = self._prefill(dict.fromkeys(request.prompt_ids for request in requests))
            self._draw(rows, torch.stack([prompts[row.request.prompt_ids][1] for row in rows]))
            self._write([row for row in rows if not row.done], {ids: p for ids, (p, _) in prompts.items()})
        return [
            Sample(tuple(row.ids), tuple(row.logps), "stop" if row.stopped else "length", self.policy_version)
            for row in rows
        ]

    # the prompts

    def _prefill(self, prompts: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[_Prefix, Tensor]]:
        """Every prompt's keys and values, and the logits (V,) behind its last token."""
        arrays = [np.array(ids) for ids in prompts]
        self._prefill_shared(arrays)
        # Most new tokens first: rows of one forward have about as many, and padding stays small.
        known = [self._known(ids) for ids in arrays]
        waiting = sorted(range(len(arrays)), key=lambda i: (known[i][1] - len(arrays[i]), -known[i][1], i))
        found = {}
        while waiting:
            most = len(arrays[waiting[0]]) - known[waiting[0]][1]
            room = min(self.settings.max_rows, max(1, _PREFILL_TOKENS // most))
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

    def _known(self, ids: np.ndarray) -> tuple[_Prefix | None, int]:
        """The longest computed beginning, short of the last token, whose logits are needed."""
        prefix, length = self._prefixes.find(ids)
        return prefix, min(length, len(ids) - 1)

    def _forward(
        self, rows: Sequence[tuple[np.ndarray, _Prefix | None, int]]
    ) -> list[tuple[_Prefix, Tensor]]:
        """Complete (ids, kept sequence, how much of it) to the end of the ids, in one forward."""
        batch, new = self._batch, [len(ids) - length for ids, _, length in rows]
        past = max(length for _, _, length in rows)
        batch.open(past, past + max(new))
        for _, prefix, length in rows:
            batch.put(prefix, length)
        tokens = torch.zeros((len(rows), max(new)), dtype=torch.long)
        for slot, (ids, _, length) in enumerate(rows):
            tokens[slot, : new[slot]] = torch.from_numpy(ids[length:])
        lasts = sorted({count - 1 for count in new})
        logits = self._logits(tokens, new, torch.tensor(lasts, device=self.device))
        results = []
        for slot, (ids, _, length) in enumerate(rows):
            prefix = batch.take(slot, ids, past - length)
            self._prefixes.add(prefix)
            results.append((prefix, logits[slot, lasts.index(new[slot] - 1)]))
        return results

    def _logits(self, tokens: Tensor, new: Sequence[int], keep: int | Tensor) -> Tensor:
        """Logits (B, kept, V) in float32 after a forward that writes its keys and values into the batch."""
        mask, positions = self._batch.mask(self.device, new)
        output = self.model(
            input_ids=tokens.to(self.device),
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_name: self._batch},
        )
        return output.logits.float()

    # the messages

    def _write(self, rows: Sequence[_Row], prompts: dict[tuple[int, ...], _Prefix]) -> None:
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
            logits = self._logits(torch.tensor([[row.ids[-1]] for row in live]), [1] * len(live), 1)
            batch.advance()
            self._draw(live, logits[:, -1])
            for slot in reversed(range(len(live))):
                if live[slot].done:
                    ids = live[slot].computed
                    self._prefixes.add(batch.take(slot, ids, batch.end - len(ids)))
                    batch.drop(slot)
                    live[slot] = live[-1]
                    live.pop()

    def _draw(self, rows: Sequence[_Row], logits: Tensor) -> None:
        """One token for each row from its logits (B, V), by inverting the distribution function.

        A row takes one number from its own stream and nothing from its neighbours.
        """
        logps = torch.log_softmax(logits / self.settings.temperature, dim=-1)
        cumulative = logps.double().exp().cumsum(-1)  # fp64: 50k small terms
        uniform = torch.tensor(
            [[row.stream.random()] for row in rows], dtype=torch.float64, device=logits.device
        )
        ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        ids = ids.clamp(max=logits.shape[-1] - 1)
        chosen = logps.gather(-1, ids)
        if not torch.isfinite(chosen).all():
            self.flush()  # no NaN may stay behind masked columns
            raise SamplerError(
                f"the model's logits are not finite at policy version {self.policy_version}: its weights hold NaN or "
                "infinite values; resume from an earlier checkpoint with a lower learning rate"
            )
        for row, token, logp in zip(rows, ids[:, 0].tolist(), chosen[:, 0].tolist(), strict=True):
            row.ids.append(token)
            row.logps.append(logp)
            row.stopped = token in self.renderer.stop_ids


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """No dropout while sampling; the mode from before comes back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
