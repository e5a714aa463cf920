"""Settings that were changed in the recipe of a stopped run: those that it may resume with, and their record.

A run keeps the settings it began with in its manifest, beside `recipe.toml`, which a person may edit. A change
of the model, tasks, seed, budgets or losses is refused, since figures from before and after it would be mixed in one
table. A permitted change is noted with the step from which it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from woodshed.records import RunError
from woodshed.runs.folder import RunDir
from woodshed.settings import Settings

FREE = (
    *("name", "note", "runs", "tracking"),
    *(
        "engine.max_rows",
        "engine.cache_mb",
        "engine.gpus",
        "rollout.tool_threads",
        "grading.jobs",
        "loss.micro_batch_tokens",
    ),
    *("policy.activation_checkpointing", "policy.device"),
    "checkpoint_every",
)
"""Settings that change the place and speed of a run, and not its results."""

PACE = ("learning_rate", "warmup_steps", "decay_share")
"""Settings of the optimizer that may change."""

NOTED = (
    *FREE,
    *("engine.servers", "engine.arguments"),  # servers move; their weights are compared with the trainer's
    *(f"optimizer.{name}" for name in PACE),
    "sft.learning_rate",
    *("rl.steps", "sft.steps", "distill.steps", "evaluation.every"),
    *("layout.fsdp", "layout.replicate", "layout.cp", "layout.ep"),
    "stability.max_kl_to_start",
    *("curriculum.repeats", "curriculum.grow"),
)
"""Settings that may change when a training run is resumed."""


def settings_of(chosen: Settings) -> dict[str, Any]:
    """The settings that a new run's manifest keeps."""
    return {"settings": chosen.model_dump(mode="json", exclude_none=True)}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name to the value on both sides, None where a side has none; only what differs."""
    sides = [dict(_flat(side)) for side in (before, after)]
    names = sorted({*sides[0], *sides[1]})
    pairs = {name: (sides[0].get(name), sides[1].get(name)) for name in names}
    return {name: values for name, values in pairs.items() if values[0] != values[1]}


def accept(
    run: RunDir, chosen: Settings, *, allowed: tuple[str, ...], stage: str = "", steps_taken: int = 0
) -> list[str]:
    """Note the settings that a resumed run changes, a sentence each.

    Args:
        allowed: `NOTED`, or `FREE` if nothing that is measured may change.
        stage: the present stage of the run; "" for an evaluation.
        steps_taken: steps of the stage that were taken already.

    Raises:
        RunError: a setting that may not change, or fewer steps than were taken; nothing is noted.
    """
    settings, manifest = settings_of(chosen)["settings"], run.manifest
    before = manifest.get("settings")
    changed = differences(before, settings) if isinstance(before, dict) else {}
    if refused := [name for name in changed if name not in allowed]:
        raise RunError(
            f"{run.path / 'recipe.toml'} was changed since the run began: {_change(refused[0], *changed[refused[0]])}"
            f"{f', and {len(refused) - 1} more' if len(refused) > 1 else ''}. A run cannot be resumed with that: undo "
            "the change, or start another run with name=OTHER"
        )
    steps = settings.get(stage, {}).get("steps", 0)
    if f"{stage}.steps" in changed and steps < steps_taken:
        raise RunError(
            f"{stage}.steps = {steps}, but {steps_taken} steps were taken; set it to {steps_taken} or more"
        )
    if not changed and before is not None:
        return []
    since = f"step {steps_taken} of {stage}" if stage else "here"
    notes = [f"from {since}: {_change(name, *values)}" for name, values in changed.items()]
    manifest["settings"] = settings
    if notes:
        manifest["changes"] = [*manifest.get("changes", ()), *notes]
    run.write_manifest(manifest)
    return notes


def refuse_other(run: RunDir, chosen: Settings) -> None:
    """Check that an existing run, which a command would resume or skip, was begun with the same settings.

    Raises:
        RunError: names what differs.
    """
    changed = differences(run.recipe(), settings_of(chosen)["settings"])
    if refused := [name for name in changed if name not in FREE]:
        raise RunError(
            f"{run.path} was begun with other settings: {_change(refused[0], *changed[refused[0]])}. Undo the changes, "
            "or choose another name with name=OTHER"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _change(name: str, before: Any, after: Any) -> str:
    sides = ["unset" if value is None else str(value)[:80] for value in (before, after)]
    return f"{name} was {sides[0]} and is {sides[1]}"
