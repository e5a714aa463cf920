"""A run's final policy as a model directory that others load without Woodshed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from woodshed.evals import card
from woodshed.inference import local
from woodshed.inference.weights import check_config, load_tokenizer
from woodshed.records import RunError
from woodshed.rundir import RunDir, staged, sweep


def export(run: RunDir, out: Path, *, problems: list[str]) -> Path:
    """Write safetensors, configuration, tokenizer, chat template and a card (README.md) to `out`, all or nothing.

    An adapter is merged into its base in float32, and then rounded to the recipe's `policy.export_dtype`.

    Raises:
        RunError: the run has no final weights yet, `out` holds something, or cannot be written.
        ModelError: base weights that cannot be found or read.
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
    model = model.to(getattr(torch, settings.get("export_dtype", "float32")))
    sweep(out.parent)
    try:
        with staged(out) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            (partial / "README.md").write_text(text, encoding="utf-8")
    except Exception as error:  # the libraries' writers raise their own kinds when the disk is full
        raise RunError(f"cannot write {out}: {error}") from error
    return out


def _load(policy: Path, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The whole model in float32, adapter merged, and its tokenizer."""
    if (policy / "adapter_config.json").is_file():
        loaded = local.load(settings["model"], dtype="float32", adapter=policy)
        return loaded.model.merge_and_unload(), loaded.tokenizer
    from transformers import AutoModelForCausalLM

    check_config(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, **local.SAFE)
    return model, load_tokenizer(settings["model"])[0]
