"""Loading of a causal language model from any specification of `tokens.model_files`, with an optional adapter."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from woodshed.engines.local import invariant
from woodshed.records import ModelError
from woodshed.runs.files import staged, sweep
from woodshed.tokens.model_files import (
    FOREIGN_CODE,
    ModelSource,
    check_adapter,
    models_dir,
    resolve,
    wants_code,
)

SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
"""Arguments for loading weights: from disk only, no code from the model's folder, and no pickled files."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory, on the CPU, in evaluation mode."""

    model: Any
    tokenizer: Any
    directory: Path
    """Hugging Face folder of the model."""


def load(
    spec: str,
    *,
    dtype: str = "float32",
    adapter: Path | None = None,
    cache: Path | None = None,
    is_hollow: bool = False,
) -> LoadedModel:
    """Load weights and tokenizer from any specification of `tokens.model_files`, with an unmerged PEFT adapter.

    A GGUF file is dequantised once, to bfloat16 safetensors in the cache, so that every machine and every precision
    starts from the same numbers.

    Args:
        is_hollow: leave the base's weights out. They are zeros that take no memory, and are no good but to be replaced.

    Raises:
        ModelError: weights, tokenizer or adapter that cannot be found, verified or read; names the file.
    """
    from transformers import AutoTokenizer

    source = resolve(spec, cache)
    directory = _dequantised(source, models_dir(cache)) if source.gguf else source.directory
    with _quiet(), _explained(directory, "folder"):
        model = (_hollow if is_hollow else _whole)(directory, getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    rows = model.get_input_embeddings().num_embeddings
    if tokenizer.vocab_size > rows:
        raise ModelError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens and the model {rows}; they belong to "
            "different models"
        )
    model.eval()
    invariant.install(model)
    if adapter is not None:
        model = with_adapter(model, adapter)
    return LoadedModel(model, tokenizer, directory)


def _whole(directory: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, output_loading_info=True, **SAFE
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        # transformers would initialise them at random
        raise ModelError(f"{directory}: {len(missing)} weights are missing, {missing[0]!r} among them")
    return model


def _hollow(directory: Path, dtype: torch.dtype) -> Any:
    """The model that a folder describes, with zeros of one element as weights, stretched to their shapes."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    apart = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(directory, **apart)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    for module in model.modules():
        for key, weight in module.named_parameters(recurse=False):
            zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, key, torch.nn.Parameter(zeros, requires_grad=weight.requires_grad))
    model.tie_weights()
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model


def with_adapter(model: Any, adapter: Path) -> Any:
    """The model with an unmerged PEFT adapter; its own layers are wrapped.

    Raises:
        ModelError: the adapter cannot be read, or belongs to another model.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    check_adapter(adapter)
    weights = adapter / "adapter_model.safetensors"
    with _quiet(), _explained(adapter, "adapter"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses an old name of transformers
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        try:
            adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
        except (RuntimeError, ValueError) as error:
            if not re.search(r"size mismatch|Target modules .* not found", str(error), re.DOTALL):
                raise
            base = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
            raise ModelError(
                f"{adapter} does not fit the model {model.config.name_or_path}: it was made for "
                f"{base.get('base_model_name_or_path') or 'another one'}. Name that model, or another adapter"
            ) from error
        state = get_peft_model_state_dict(adapted, save_embedding_layers=False)  # "auto" may ask the hub
        with safe_open(weights, "pt") as file:
            unused = sorted(name for name in set(file.keys()) - set(state) if "lora_" in name)
        if unused:
            raise ModelError(
                f"{adapter} belongs to another model: this one does not have {len(unused)} of its weights, "
                f"{unused[0]!r} among them"
            )
    return compute_in_model_precision(adapted)


def compute_in_model_precision(model: Any) -> Any:
    """Let the LoRA adapters of a PEFT model compute in the precision of the model, and add their output in place.

    PEFT converts every input of a float32 adapter to float32, and keeps the copies and the intermediate results for the
    backward pass.
    """
    for layer in model.modules():
        if type(layer) is _plain_adapter() and not any(
            (layer.lora_variant, layer.merged, *layer.lora_bias.values())
        ):
            layer.__class__ = _adapted_linear()
    return model


def adapter_weights(model: Any) -> Iterator[tuple[torch.nn.Parameter, torch.dtype]]:
    """Weights of the adapters that compute in the precision of the model, each with that precision."""
    for layer in model.modules():
        if isinstance(layer, _adapted_linear()):
            for matrices in (layer.lora_A, layer.lora_B):
                yield from ((each.weight, layer.base_layer.weight.dtype) for each in matrices.values())


def _plain_adapter() -> type:
    from peft.tuners.lora.layer import Linear

    return Linear


@functools.cache
def _adapted_linear() -> type:
    class AdaptedLinear(_plain_adapter()):
        """A linear layer with one LoRA adapter, whose matrices are used in the precision of the input."""

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            name, *others = self.active_adapters or ("",)
            is_plain = name in self.lora_A and name not in self.lora_variant
            if not is_plain or args or kwargs or others or self.disable_adapters or self.merged:
                return super().forward(x, *args, **kwargs)
            result = self.base_layer(x)
            down, up = self.lora_A[name].weight.to(x.dtype), self.lora_B[name].weight.to(x.dtype)
            inner = invariant.linear(self.lora_dropout[name](x), down)
            result.view(-1, len(up)).addmm_(inner.view(-1, len(down)), up.T, alpha=self.scaling[name])
            return result

    return AdaptedLinear


def _dequantised(source: ModelSource, models: Path) -> Path:
    """The Hugging Face folder of a GGUF file, converted once; several processes may convert it at the same time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    assert source.gguf is not None
    path = source.directory / source.gguf
    stat = path.stat()
    identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    final = models / f"{path.stem}-bf16-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if final.is_dir():
        return final
    models.mkdir(parents=True, exist_ok=True)
    sweep(models)
    with staged(final, keep=True) as partial, _quiet(), _explained(path, "GGUF file"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.directory,
            gguf_file=source.gguf,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        model, info = loaded
        tokenizer = AutoTokenizer.from_pretrained(
            source.directory, gguf_file=source.gguf, local_files_only=True, trust_remote_code=False
        )
        for name in (
            "bos",
            "eos",
            "pad",
        ):  # transformers 5.17 reads those of the tokenizer wrongly from GGUF
            if (token := getattr(model.config, f"{name}_token_id", None)) is not None:
                setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
        if info["missing_keys"]:
            raise ModelError(f"{path}: weights are missing, {sorted(info['missing_keys'])[0]!r} among them")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return final


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and messages of libraries; the caller shows progress."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the GGUF reader shows its own progress bar
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _explained(path: Path, noun: str) -> Iterator[None]:
    """Turn any error of a loader into a ModelError that names the file."""
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # loaders raise many types of errors for damaged files
        first, _, rest = str(error).strip().partition("\n")
        more = " ".join(rest.split())[:200] if first.endswith(":") else ""
        reason = f"{first} {more}".strip() or type(error).__name__
        if wants_code(error):
            reason = FOREIGN_CODE
        raise ModelError(f"{path}: this {noun} cannot be loaded: {reason}") from error
