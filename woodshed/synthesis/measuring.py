"""Measurements of a repository before anything is removed, made once and kept beside the tasks.

First the baseline, then which tests touch which lines, then what also stands in libraries. Each part is kept as soon as
it is known, so that what was stopped goes on where it was.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from woodshed.records import TaskError, from_json, to_json
from woodshed.runs.files import write_atomically
from woodshed.synthesis import clocks, leaks, mapping, reports, selection, sources
from woodshed.synthesis.baseline import Baseline, measure
from woodshed.synthesis.coverage_map import Map
from woodshed.synthesis.progress import Phases
from woodshed.synthesis.repository_context import (
    FIT,
    GENERATOR,
    RepositoryMeasurements,
    SynthesisSettings,
    texts,
)
from woodshed.synthesis.siblings import surroundings
from woodshed.synthesis.suite import SuiteLimits
from woodshed.tasks import folder

SLOWER = 5
"""So many times as long as a run of the suite a slowed one may take, if it is not longer than mapping may take."""
TASK_SHARE = 2.0
"""A task takes about so many times as long as the runs of its suite, until the first ones say it better."""
SLOWED = 4.0
"""A slowed run takes about so many times as long."""
MAP_SHARE = 1.5
"""Mapping a suite takes about so many times as long as its runs, until a first session says it better."""


def measured_once(
    repository: sources.Repository, out: Path, settings: SynthesisSettings, phases: Phases
) -> RepositoryMeasurements:
    """Measure a repository once: all tasks of a set share one environment, whenever they are made.

    A map that wanted time is gone on with where `settings.mapping_timeout_s` was raised since.
    """
    place = _place(repository, settings)
    kept, parts = out / ".baselines" / f"{place}.json", out / ".baselines" / f"{place}.parts"
    log = out / ".logs" / place
    if (known := read_kept(kept)) and _is_enough(known, settings.mapping_timeout_s):
        mapped, copied = known.pop("map"), known.pop("copies")
        calls = tuple((a, b, c, d) for a, b, c, d in mapped["calls"])
        baseline = reports.with_report(_baseline(known, repository), log)
        copies = {(path, name): where for path, name, where in copied}
        for phase in ("suite", "map"):
            phases.expect(phase, 0)
        return RepositoryMeasurements(
            baseline, Map(baseline.stable, mapped["lines"], calls, tuple(mapped["unmapped"])), copies, log
        )
    for phase in ("suite", "map"):
        phases.bound(phase, settings.mapping_timeout_s)
    with _gone_if_refused(parts):
        baseline = _first(repository, parts, log, settings, phases)
    sandboxes = settings.sandbox.create()
    with ThreadPoolExecutor(1) as beside:
        code = texts(baseline, baseline.package_files, ".py")
        searching = beside.submit(leaks.copies, code, baseline.spec, sandboxes)
        mapped = mapping.measure(
            baseline, parts / "map", settings.mapping_timeout_s, phases.named("map"), sandboxes=sandboxes
        )
        phases.expect("map", 0)
        baseline, mapped = _usable(baseline, mapped, settings, phases)
        phases.named("copies")(0, 0, f"searching this machine for other copies of {repository.name}")
        copied = searching.result()
    known = _with_contents(baseline)
    known["map"] = {"lines": mapped.lines, "calls": mapped.calls, "unmapped": mapped.unmapped}
    known["map"]["timeout_s"] = settings.mapping_timeout_s
    known["copies"] = [[*place, where] for place, where in copied.items()]
    write_atomically(kept, json.dumps(known, indent=1))
    if not mapped.unmapped and not baseline.unmeasured:
        shutil.rmtree(parts, ignore_errors=True)
    return RepositoryMeasurements(baseline, mapped, copied, log)


@contextlib.contextmanager
def _gone_if_refused(parts: Path) -> Iterator[None]:
    """Leave no folder behind of a repository that cannot be used: nothing of it will be gone on with."""
    try:
        yield
    except TaskError:
        shutil.rmtree(parts, ignore_errors=True)
        with contextlib.suppress(OSError):
            parts.parent.rmdir()
        raise


def _place(repository: sources.Repository, settings: SynthesisSettings) -> str:
    """Name of what is kept for a repository: another one for whatever changes the outcomes of its tests."""
    asked = [GENERATOR, repository.sha256, repository.python, repository.setup, *settings.extra_requirements]
    asked.append(surroundings(repository.tree, repository.beside, repository.origin))
    asked += [*settings.pytest_args, *settings.deselect, *settings.env]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    return f"{repository.name}-{key}"


def _is_enough(known: Mapping[str, Any], timeout_s: float) -> bool:
    """True if more time would bring nothing, or none is given."""
    is_whole = not known["map"]["unmapped"] and not known["unmeasured"]
    return is_whole or timeout_s <= known["map"]["timeout_s"]


def _first(
    repository: sources.Repository, parts: Path, log: Path, settings: SynthesisSettings, phases: Phases
) -> Baseline:
    """The baseline as an earlier call left it, unless more time brings more tests."""
    kept = parts / "baseline.json"
    known = read_kept(kept, {"contents", "unmeasured"})
    if known and not known["unmeasured"]:
        phases.expect("suite", 0)
        return reports.with_report(_baseline(known, repository), log)
    limits = SuiteLimits(
        timeout_s=settings.timeout_s, whole_s=max(settings.timeout_s, settings.mapping_timeout_s)
    )
    tasks = TASK_SHARE * settings.limit / settings.jobs
    measured = measure(
        repository,
        extra_requirements=settings.extra_requirements,
        variables=settings.env,
        options=selection.options(repository.tree, settings.pytest_args, settings.deselect),
        limits=limits,
        kept=parts / "suite",
        progress=phases.named("suite", {"map": MAP_SHARE, **({"tasks": tasks} if tasks else {})}),
        sandboxes=settings.sandbox.create(),
    )
    phases.expect("suite", 0)
    reports.write(measured, log)
    write_atomically(kept, json.dumps(_with_contents(measured), indent=1))
    return measured


def _usable(
    baseline: Baseline, mapped: Map, settings: SynthesisSettings, phases: Phases
) -> tuple[Baseline, Map]:
    """The baseline and its map without tests that judge time, and the slowest where all do not fit into one run."""
    limit_s = min(SLOWER * settings.timeout_s, max(settings.timeout_s, settings.mapping_timeout_s))
    if settings.pass_to_pass == "all":
        baseline = without_slowest(baseline, FIT * settings.timeout_s)
    asked = clocks.seeing(baseline, mapped)
    slowed_s = SLOWED * sum(baseline.durations.get(test, 0.0) for test in asked)
    phases.expect("clocks", min(limit_s, slowed_s))
    baseline = clocks.without_judges_of_time(
        baseline, asked, limit_s, phases.named("clocks"), settings.sandbox.create()
    )
    phases.expect("clocks", 0)
    return baseline, mapping.restricted(mapped, baseline.stable)


def without_slowest(baseline: Baseline, most_s: float) -> Baseline:
    """The baseline without as many of its slowest tests as it takes for the others to fit into `most_s` seconds."""
    left_s = sum(baseline.durations.get(test, 0.0) for test in baseline.stable)
    slow: list[str] = []
    for test in sorted(baseline.stable, key=lambda test: -baseline.durations.get(test, 0.0)):
        if left_s <= most_s:
            break
        left_s -= baseline.durations.get(test, 0.0)
        slow.append(test)
    return replace(
        baseline,
        stable=tuple(test for test in baseline.stable if test not in set(slow)),
        broken=tuple(sorted({*baseline.broken, *slow})),
        slow=tuple(sorted(slow)),
    )


def _with_contents(baseline: Baseline) -> dict[str, Any]:
    tree = baseline.repository.tree
    contents = {p: base64.b64encode((tree / p).read_bytes()).decode() for p in baseline.generated}
    known = {**to_json(baseline), "contents": contents}
    for key in ("repository", *reports.VARYING):
        del known[key]
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
