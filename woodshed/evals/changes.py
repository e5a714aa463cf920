"""Settings that were changed in the recipe of a stopped run: which may go on, and what is kept about them.

A run keeps the settings it began with in its manifest, beside `recipe.toml`, which a person may edit. What makes a run
another run (its model, tasks, seed, budgets, losses) is refused when it goes on: figures from before and after the
change would stand in one table. What may change is noted with the step from which it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from woodshed.records import RunError
from woodshed.runs.folder import RunDir
from woodshed.settings import Settings

FREE = (
    *("name", "note", "runs", "tracking", "prices"),
    *(
        "engine.max_rows",
        "engine.cache_mb",
        "rollout.tool_threads",
        "grading.jobs",
        "loss.micro_batch_tokens",
    ),
    *("feedback.offload_teacher", "distill.feedback.offload_teacher", "policy.export_dtype", "policy.device"),
    "policy.activation_checkpointing",
    "sft.checkpoint_every",
)
"""Settings that change where and how fast a run works, not what it finds."""

PACE = ("learning_rate", "warmup_steps", "decay_share", "max_grad_norm")
"""Of an optimizer. Its momenta and decay are kept in the checkpoint, which wins over the recipe."""

NOTED = (
    *FREE,
    *(f"{section}optimizer.{name}" for section in ("", "sft.", "distill.") for name in PACE),
    *("rl.steps", "sft.steps", "distill.steps", "evaluation.every"),
    *("layout.fsdp", "layout.replicate", "layout.ep"),
    *(f"stability.{name}" for name in ("max_kl_to_start", "max_logp_gap", "invalid_factor", "invalid_floor")),
    *("curriculum.repeats", "curriculum.grow"),
)
"""Settings that a stopped run of training may go on with."""


def settings_of(chosen: Settings) -> dict[str, Any]:
    """The settings that a new run's manifest keeps."""
    return {"settings": chosen.model_dump(mode="json", exclude_none=True)}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name to the value on both sides, None where a side has none; only what differs."""
    sides = [dict(_flat(side)) for side in (before, after)]
    names = sorted({*sides[0], *sides[1]})
    found = {name: (sides[0].get(name), sides[1].get(name)) for name in names}
    return {name: values for name, values in found.items() if values[0] != values[1]}


def accept(
    run: RunDir, chosen: Settings, *, allowed: tuple[str, ...], stage: str = "", taken: int = 0
) -> list[str]:
    """Note the settings in which a run goes on otherwise than it was, a sentence each.

    Args:
        allowed: `NOTED`, or `FREE` where nothing that is measured may change.
        stage: the stage in which the run stands; "" for an evaluation.
        taken: steps of it that were taken already.

    Raises:
        RunError: a setting that may not change, or fewer steps than were taken; nothing is noted.
    """
    now, manifest = settings_of(chosen)["settings"], run.manifest
    known = manifest.get("settings")
    found = differences(known, now) if isinstance(known, dict) else {}
    if odd := [name for name in found if name not in allowed]:
        raise RunError(
            f"{run.path / 'recipe.toml'} was changed since the run began: {_said(odd[0], *found[odd[0]])}"
            f"{f', and {len(odd) - 1} more' if len(odd) > 1 else ''}. A run cannot go on with that: put it back, or "
            "start another run with name=OTHER"
        )
    steps = now.get(stage, {}).get("steps", 0)
    if f"{stage}.steps" in found and steps < taken:
        raise RunError(f"{stage}.steps = {steps}, but {taken} steps were taken; set it to {taken} or more")
    if not found and known is not None:
        return []
    at = f"step {taken} of {stage}" if stage else "here"
    notes = [f"from {at}: {_said(name, *values)}" for name, values in found.items()]
    manifest["settings"] = now
    if notes:
        manifest["changes"] = [*manifest.get("changes", ()), *notes]
    run.write_manifest(manifest)
    return notes


def refuse_other(run: RunDir, chosen: Settings) -> None:
    """Check that a run which a command would go on with, or leave as it is, was begun with the same settings.

    Raises:
        RunError: names what differs.
    """
    found = differences(run.recipe(), settings_of(chosen)["settings"])
    if odd := [name for name in found if name not in FREE]:
        raise RunError(
            f"{run.path} was begun with other settings: {_said(odd[0], *found[odd[0]])}. Put them back, or choose "
            "another name with name=OTHER"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _said(name: str, before: Any, after: Any) -> str:
    sides = ["unset" if value is None else str(value)[:80] for value in (before, after)]
    return f"{name} was {sides[0]} and is {sides[1]}"
