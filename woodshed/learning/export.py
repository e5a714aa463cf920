"""A run's final policy as a model directory that others load without Woodshed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from woodshed.engines import local
from woodshed.evals import card
from woodshed.records import ModelError, RunError
from woodshed.runs.files import staged, sweep, way_out
from woodshed.runs.folder import RunDir
from woodshed.tokens.model_files import check_config, load_tokenizer


def export(run: RunDir, out: Path, *, problems: list[str]) -> Path:
    """Write safetensors, configuration, tokenizer, chat template and a card (README.md) to `out`, all or nothing.

    An adapter is merged into its base in float32, and then rounded to the recipe's `policy.dtype`. Where it
    changes an embedding that the base shares with its output layer, the two are written apart. What was merged, and
    what was written, must say what the run's policy says.

    Raises:
        RunError: the run has no final weights yet, `out` holds something, or cannot be written.
        ModelError: base weights that cannot be found or read, or an adapter that no plain model can hold.
    """
    policy = run.path / "policy"
    if run.is_evaluation:
        raise RunError(f"{run.path} measured a model and trained none, so it has no weights to export")
    if not policy.is_dir():
        raise RunError(f"{run.path} has no final weights; finish it with `{run.resuming}`, then export")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise RunError(f"{out} is not an empty folder; choose another one with --out, or delete it")
    settings = run.section("policy")
    text = card.write(run, problems=problems)
    model, tokenizer = _load(policy, settings)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    for weight in model.parameters():  # rounded as they are written; compared in float32, where kernels agree
        weight.data = weight.data.to(dtype).float()
    said = _log_probs(model)
    sweep(out.parent)
    try:
        with staged(out) as partial:
            with local.quiet():
                model.to(dtype).save_pretrained(partial)
                tokenizer.save_pretrained(partial)
            del model
            (partial / "README.md").write_text(text, encoding="utf-8")
            _refuse_another(said, _log_probs(local.load(str(partial)).model), "what was written")
    except ModelError:
        raise
    except Exception as error:  # the libraries' writers raise their own kinds when the disk is full
        raise RunError(f"cannot write {out}: {error}; {way_out(error)}") from error
    return out


def _load(policy: Path, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The whole model in float32, adapter merged, and its tokenizer."""
    if (policy / "adapter_config.json").is_file():
        loaded = local.load(settings["model"], dtype="float32", adapter=policy)
        return _merged(loaded.model, policy), loaded.tokenizer
    from transformers import AutoModelForCausalLM

    check_config(policy)
    with local.quiet():
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, **local.SAFE)
    return model, load_tokenizer(settings["model"])[0]


def _merged(model: Any, policy: Path) -> Any:
    """The base with its adapter's changes inside.

    Raises:
        ModelError: an adapter whose changes the base has no place for.
    """
    said = _log_probs(model)
    _untie(model)
    try:
        merged = model.merge_and_unload()
    except (RuntimeError, ValueError, NotImplementedError) as error:  # by the kind of adapter
        raise ModelError(
            f"{policy}: this adapter cannot be merged into its base ({error}); use it as the adapter that it is, or "
            "train one without lora_bias and the like"
        ) from error
    _refuse_another(said, _log_probs(merged), "the merged model")
    ends = merged.get_input_embeddings().weight, merged.get_output_embeddings().weight
    is_tied = ends[0].data_ptr() == ends[1].data_ptr()
    merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = is_tied
    return merged


def _untie(model: Any) -> None:
    """Give the output layer weights of its own, where an adapter changes it or the embedding that it shares with."""
    ends = [model.get_base_model().get_input_embeddings(), model.get_base_model().get_output_embeddings()]
    config = model.config.get_text_config()
    if not config.tie_word_embeddings or not any(_is_adapted(end) for end in ends):
        return
    inner, outer = (_innermost(end) for end in ends)
    if outer.weight is inner.weight:
        outer.weight = torch.nn.Parameter(inner.weight.detach().clone(), requires_grad=False)


def _is_adapted(layer: Any) -> bool:
    return layer is not _innermost(layer)


def _innermost(layer: Any) -> Any:
    """The model's own layer under whatever PEFT put around it."""
    while (
        inner := getattr(layer, "base_layer", None) or getattr(layer, "original_module", None)
    ) is not None:
        layer = inner
    return layer


PROBED, AGREES = 64, 2e-2
"""Tokens that a model is asked about, and how far two log-probs of the same model may lie apart, in nats."""


def _log_probs(model: Any) -> Tensor:
    """The model's word on tokens from all over its vocabulary: (PROBED, V)."""
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(PROBED) * (rows - 1) // (PROBED - 1)
    ids = ids[torch.randperm(PROBED, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0].float().log_softmax(-1)


def _refuse_another(expected: Tensor, found: Tensor, what: str) -> None:
    gap = float((expected - found).abs().max())
    if not gap <= AGREES:  # a NaN is not either
        raise ModelError(
            f"{what} is not the policy of this run: a token's log-prob differs by {gap:.2g} nats. Nothing is written; "
            "use the policy as the adapter that it is"
        )
