"""Measurements of a repository before anything is removed, made once and kept beside the tasks.

First the baseline, then which tests touch which lines, then what also stands in libraries. Each part is kept as soon as
it is known, so that what was stopped goes on where it was.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from woodshed.records import from_json, to_json
from woodshed.runs.files import write_atomically
from woodshed.synthesis import clocks, leaks, mapping, selection, sources
from woodshed.synthesis.baseline import Baseline, Progress, measure
from woodshed.synthesis.coverage_map import Map
from woodshed.synthesis.project import PYTHON
from woodshed.synthesis.repository_context import GENERATOR, RepositoryMeasurements, SynthesisSettings, texts
from woodshed.tasks import folder

SLOWER = 5
"""So many times as long as a run of the suite a slowed one may take, if it is not longer than mapping may take."""


def measured_once(
    repository: sources.Repository, out: Path, settings: SynthesisSettings, progress: Progress
) -> RepositoryMeasurements:
    """Measure a repository once: all tasks of a set share one environment, whenever they are made.

    A map that wanted time is gone on with where `settings.mapping_timeout_s` was raised since.
    """
    asked = [GENERATOR, repository.sha256, PYTHON, *settings.extra_requirements]
    asked += [*settings.pytest_args, *settings.deselect, *settings.env]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    home = out / ".baselines" / f"{repository.name}-{key}"
    kept, parts = home.with_name(f"{home.name}.json"), home.with_name(f"{home.name}.parts")
    if (known := read_kept(kept)) and _is_enough(known["map"], settings.mapping_timeout_s):
        mapped, copied = known.pop("map"), known.pop("copies")
        calls = tuple((a, b, c, d) for a, b, c, d in mapped["calls"])
        baseline = _baseline(known, repository)
        copies = {(path, name): where for path, name, where in copied}
        return RepositoryMeasurements(
            baseline, Map(baseline.stable, mapped["lines"], calls, tuple(mapped["unmapped"])), copies
        )
    baseline = _first(repository, parts / "baseline.json", settings, progress)
    sandboxes = settings.sandbox.create()
    with ThreadPoolExecutor(1) as beside:
        code = texts(baseline, baseline.package_files, ".py")
        searching = beside.submit(leaks.copies, code, baseline.spec, sandboxes)
        mapped = mapping.measure(
            baseline, parts / "map", settings.mapping_timeout_s, progress, sandboxes=sandboxes
        )
        progress(0, 0, f"searching this machine for other copies of {repository.name}")
        copied = searching.result()
    known = _with_contents(baseline)
    known["map"] = {"lines": mapped.lines, "calls": mapped.calls, "unmapped": mapped.unmapped}
    known["map"]["timeout_s"] = settings.mapping_timeout_s
    known["copies"] = [[*place, where] for place, where in copied.items()]
    write_atomically(kept, json.dumps(known, indent=1))
    if not mapped.unmapped:
        shutil.rmtree(parts, ignore_errors=True)
    return RepositoryMeasurements(baseline, mapped, copied)


def _is_enough(mapped: Mapping[str, Any], timeout_s: float) -> bool:
    return not mapped["unmapped"] or timeout_s <= mapped["timeout_s"]


def _first(
    repository: sources.Repository, kept: Path, settings: SynthesisSettings, progress: Progress
) -> Baseline:
    """The baseline, without tests that judge time; as an earlier call left it."""
    if known := read_kept(kept, {"contents"}):
        return _baseline(known, repository)
    sandboxes = settings.sandbox.create()
    measured = measure(
        repository,
        extra_requirements=settings.extra_requirements,
        variables=settings.env,
        options=selection.options(repository.tree, settings.pytest_args, settings.deselect),
        timeout_s=settings.timeout_s,
        progress=progress,
        sandboxes=sandboxes,
    )
    limit_s = min(SLOWER * settings.timeout_s, max(settings.timeout_s, settings.mapping_timeout_s))
    measured = clocks.without_judges_of_time(measured, limit_s, progress, sandboxes)
    measured = replace(measured, durations={})  # the only part that differs from run to run
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, json.dumps(_with_contents(measured), indent=1))
    return measured


def _with_contents(baseline: Baseline) -> dict[str, Any]:
    tree = baseline.repository.tree
    contents = {p: base64.b64encode((tree / p).read_bytes()).decode() for p in baseline.generated}
    known = {**to_json(baseline), "contents": contents}
    del known["repository"]
    return known


def _baseline(known: dict[str, Any], repository: sources.Repository) -> Baseline:
    for path, content in known.pop("contents").items():
        (repository.tree / path).parent.mkdir(parents=True, exist_ok=True)
        (repository.tree / path).write_bytes(base64.b64decode(content))
    return from_json(Baseline, {**known, "repository": to_json(repository)})


def read_kept(file: Path, parts: Set[str] = frozenset({"contents", "map", "copies"})) -> dict[str, Any]:
    """Read an earlier measurement. One that is incomplete or not ours counts as none, and is made again."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        whole = parts <= known.keys() and all(map(folder.is_clean, known["contents"]))
        whole = (
            whole and {"unmapped", "timeout_s"} <= known.get("map", {"unmapped": 0, "timeout_s": 0}).keys()
        )
    except (FileNotFoundError, ValueError, AttributeError):
        return {}
    return known if whole else {}


def notes(measured: RepositoryMeasurements) -> list[str]:
    """Remarks on a repository's tests that a person should read: everything that is left out, and why."""
    baseline, unmapped = measured.baseline, measured.map.unmapped
    name, timed = baseline.repository.name, baseline.timed
    failing = [test for test in baseline.broken if test not in timed]
    remarks = []
    if timed:
        remarks.append(
            f"{name}: left out, because they measure time and would fail on a busy machine: {_some(timed)}"
        )
    if unmapped:
        remarks.append(
            f"{name}: {len(unmapped)} of {len(measured.map.tests)} tests could not be mapped to lines in time; what "
            "only they run gives no task. The same command with --set mapping_timeout_s=SECONDS, and more of them, "
            "goes on where this one stopped."
        )
    if failing:
        remarks.append(f"{name}: left out, as they fail here: {_some(failing)}")
    if baseline.uncollected:
        remarks.append(f"{name}: left out, as pytest cannot collect them here: {_some(baseline.uncollected)}")
    if baseline.left_out:
        remarks.append(f"{name}: not installed: {'; '.join(baseline.left_out)}")
    return remarks


def _some(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
