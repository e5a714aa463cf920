"""Conditions that a score depends on, kept with every run so that two runs can be compared.

The machine, versions and revision come from `machine.describe`; here is what an evaluation itself depends on: tools and
prompt as hashes, the harness's source as a hash, budgets, sampling, resources, grading, tasks and engine. Resource
settings alone moved a public benchmark by six points (Anthropic 2026, "Infrastructure noise").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import woodshed
from woodshed.agent.attempt import AgentSettings
from woodshed.agent.tools import SHELL_ENV
from woodshed.engines.engine import Engine
from woodshed.grading.verifier import GradingSettings
from woodshed.records import Task, to_json
from woodshed.runs.folder import RunDir
from woodshed.sandbox.spec import ENVIRONMENT, Limits

HARNESS = (
    "agent",
    "grading",
    "sandbox",
    "experience",
    "tokens",
    "tasks/environment.py",
)
"""Source that affects the score of a policy."""

DECISIVE = {
    "tools": "the tools that the policy is offered",
    "prompt": "the system prompt",
    "effort": "the effort that prompts ask for",
    "agent": "budgets and tool settings",
    "temperature": "the sampling temperature",
    "grading": "the grading of attempts",
    "resources": "the limits of a sandbox",
}
"""Conditions that must be equal for a comparison, with their names for people."""

INCIDENTAL = {
    "harness": "the harness's source",
    "engine": "the inference engine",
    "attempts": "attempts per task",
    "seed": "the sampling seed",
}
"""Conditions that may differ, and that a reader should know of."""


def score(
    engine: Engine,
    tasks: Sequence[Task],
    agent: AgentSettings,
    grading: GradingSettings,
    *,
    attempts: int,
    seed: int,
    effort: str | None = None,
) -> dict[str, Any]:
    """Everything that an evaluation's figures depend on, as JSON values."""
    settings = getattr(engine, "settings", None)
    return {
        "tools": fingerprint([to_json(tool) for tool in agent.tools.specs]),
        "prompt": fingerprint(agent.rules),
        "harness": harness(),
        "effort": effort,
        "agent": agent.model_dump(mode="json"),
        "temperature": getattr(settings, "temperature", 1.0),
        "grading": grading.model_dump(mode="json", exclude={"jobs"}),
        "resources": {**asdict(Limits()), "environment": fingerprint([ENVIRONMENT, SHELL_ENV])},
        "codec": engine.renderer.codec.name,
        "engine": engine.description,
        "attempts": attempts,
        "seed": seed,
        "tasks": {task.name: task.id for task in tasks},
    }


def keep(run: RunDir, conditions: dict[str, Any]) -> None:
    """Write the conditions of a score into the run's manifest, and the names of those that changed since its last one.

    Raises:
        RunError: the manifest is damaged or cannot be written.
    """
    manifest = run.manifest
    known = manifest.setdefault("score", conditions)
    changed = {name for name in conditions if name != "tasks" and known.get(name) != conditions[name]}
    if changed:
        manifest["changed"] = sorted({*manifest.get("changed", ()), *changed})
    if known is conditions or changed:
        run.write_manifest(manifest)


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(reasons against a comparison, cautions for the reader) from two manifests, a sentence each."""
    refusals, warnings = [], []
    ours, theirs = a.get("score"), b.get("score")
    if not ours or not theirs:
        return [], [
            "a run has no record of its scoring conditions (an older version wrote it); nothing was checked"
        ]
    for name, label in (DECISIVE | INCIDENTAL).items():
        if ours.get(name) != theirs.get(name):
            (refusals if name in DECISIVE else warnings).append(
                _differ(label, ours.get(name), theirs.get(name))
            )
    changed = sorted(t for t, i in ours.get("tasks", {}).items() if theirs.get("tasks", {}).get(t, i) != i)
    if changed:
        refusals.append(f"{len(changed)} tasks of the same name differ in content: {', '.join(changed[:5])}")
    for name in ("woodshed", "revision", "python", "cpu", "cores", "gpus"):
        if a.get(name) != b.get(name):
            warnings.append(_differ(name, a.get(name), b.get(name)))
    versions = [manifest.get("packages", {}) for manifest in (a, b)]
    for name in sorted(set(versions[0]) & set(versions[1])):
        if versions[0][name] != versions[1][name] and name in ENGINES:
            warnings.append(_differ(name, versions[0][name], versions[1][name]))
    return refusals, warnings


ENGINES = ("torch", "transformers", "renderers", "peft")
"""Packages whose version can change the tokens of a policy."""


def _differ(label: str, ours: Any, theirs: Any) -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        parts = [
            _differ(f"{label}: {key}", ours.get(key), theirs.get(key))
            for key in sorted({*ours, *theirs})
            if ours.get(key) != theirs.get(key)
        ]
        return "; ".join(parts)
    return f"{label}: {_short(ours)} against {_short(theirs)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def fingerprint(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def harness() -> str:
    """Fingerprint of the source that affects the score of a policy."""
    root = Path(woodshed.__file__).parent
    sources = sorted(
        file
        for name in HARNESS
        for file in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))
    )
    return fingerprint([[f.relative_to(root).as_posix(), f.read_text(encoding="utf-8")] for f in sources])
