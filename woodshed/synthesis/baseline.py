"""How a repository behaves before anything is taken away: its environment, and the tests that always pass."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from woodshed.grading.verifier import TestRun, run_tests, with_runner
from woodshed.records import Environment, TaskError
from woodshed.sandbox import Sandbox, SandboxSpec, open_sandbox
from woodshed.synthesis import project
from woodshed.synthesis.sources import Repository
from woodshed.tasks.environment import prepare, python_path, resolve
from woodshed.tasks.folder import is_protected

Progress = Callable[[int, int, str], None]

UNSTABLE_ID = re.compile(r"0x[0-9a-f]{6,}|/tmp/|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d")
"""Addresses, temporary paths and clock readings in a test id: another run would name the test differently."""
IMPORTED_AS = {
    "dateutil": "python-dateutil",
    "yaml": "pyyaml",
    "attr": "attrs",
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
}

IMPORT_ALL = """
import importlib, io, json, os, sys, traceback
answers = {}
for name in json.loads(sys.stdin.read()):
    sys.stdout = sys.stderr = io.StringIO()
    try:
        importlib.import_module(name)
        answers[name] = None
    except BaseException as error:
        frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.name == "<module>"]
        if isinstance(error, SyntaxError):
            frames = []
        ours = [[f[len("/workspace/"):], line] for f, line in frames if f.startswith("/workspace/")]
        answers[name] = [f"{type(error).__name__}: {error}", ours[-1] if ours else None]
os.write(3, json.dumps(answers).encode())
os._exit(0)
"""
"""Imports modules one after the other; for each that fails, the error and the statement of ours that was running."""


@dataclass(frozen=True)
class Baseline:
    """A repository whose tests are known."""

    repository: Repository
    environment: Environment
    allowed_paths: tuple[str, ...]
    """Where the packages lie: what a solution may change."""
    stable: tuple[str, ...]
    """Tests that passed in every run, in the order they ran in."""
    broken: tuple[str, ...]
    """Tests that failed in some run; they are not shown to the agent."""
    uncollected: tuple[str, ...]
    """Test files that cannot be collected here."""
    durations: dict[str, float]
    """Seconds per stable test, in the first run."""
    package_files: tuple[str, ...]
    """Python and .pyi files of the packages, tests left out."""
    test_files: tuple[str, ...]
    """Python files of the tests, conftest files included."""
    modules: tuple[str, ...]
    """Import names of package files that can be imported here."""

    @property
    def spec(self) -> SandboxSpec:
        """A sandbox of the untouched repository in which `run_tests` can run."""
        return with_runner(
            SandboxSpec(
                lowers=(self.repository.tree,),
                environment=prepare(self.environment),
                env={"PYTHONPATH": python_path(self.environment)},
            )
        )


def measure(
    repository: Repository,
    *,
    extra_requirements: Sequence[str] = (),
    runs: int = 3,
    timeout_s: float = 300.0,
    progress: Progress = lambda done, total, text: None,
) -> Baseline:
    """Builds the environment of a repository and runs its suite several times.

    Raises:
        TaskError: a broken build, no tests, tests that do not import or fail, or that import another copy.
    """
    total = 3
    progress(0, total, f"{repository.name}: building its metadata")
    described = project.read(repository)
    progress(1, total, f"{repository.name}: preparing its environment")
    environment = _environment(described, extra_requirements)
    tree, name = repository.tree, repository.name
    python = sorted(
        p.relative_to(tree).as_posix() for p in tree.rglob("*.py*") if p.suffix in (".py", ".pyi")
    )
    tests = [p for p in python if is_protected(p) and p.endswith(".py")]
    inside = [p for p in python if any(p == place or p.startswith(place + "/") for place in described.paths)]
    package = [p for p in inside if not is_protected(p)]
    draft = Baseline(
        repository, environment, described.paths, (), (), (), {}, tuple(package), tuple(tests), ()
    )
    progress(2, total, f"{name}: running its tests {runs} times")
    with ThreadPoolExecutor(
        runs
    ) as pool:  # at once, so that tests that depend on the clock fail here, not later
        measured = list(pool.map(lambda seed: _suite(draft, timeout_s, seed), range(runs)))
    for run in measured:
        _complain(name, run, timeout_s)
    first = measured[0]
    passed = [t for t in first.outcomes if all(run.outcomes.get(t) == "passed" for run in measured)]
    seen = {test for run in measured for test in run.outcomes}
    broken = {t for t in seen if any(run.outcomes.get(t) in ("failed", "error") for run in measured)}
    stable = [t for t in passed if not UNSTABLE_ID.search(t)]
    if not stable or len(broken) > len(stable):
        raise TaskError(_failing(name, first, broken))
    if not any(first.package_files.values()):
        raise TaskError(
            f"{name}: its tests never import {', '.join(described.packages)}, so they cannot judge it"
        )
    used = {test.partition("::")[0] for test in stable}
    done = replace(
        draft,
        stable=tuple(stable),
        broken=tuple(sorted(broken)),
        uncollected=tuple(sorted(first.collection_errors)),
        durations={test: first.durations.get(test, 0.0) for test in stable},
        test_files=tuple(sorted({*tests, *(p for p in used if (tree / p).is_file())})),
        modules=_importable(draft, described.source_roots),
    )
    progress(total, total, f"{name}: {len(stable)} stable tests")
    return done


def _suite(baseline: Baseline, timeout_s: float, hash_seed: int) -> TestRun:
    packages = baseline.environment.packages
    with open_sandbox(baseline.spec) as sandbox:
        return run_tests(sandbox, ids=None, packages=packages, timeout_s=timeout_s, hash_seed=hash_seed)


def failed_imports(sandbox: Sandbox, modules: Sequence[str]) -> dict[str, tuple[str, tuple[str, int] | None]]:
    """Modules that cannot be imported, with the error and the (path, line) of the statement of ours that failed."""
    command = ["/env/bin/python", "-c", IMPORT_ALL]
    result = sandbox.exec(command, stdin=json.dumps(list(modules)).encode(), timeout_s=120, channel=True)
    if not result.channel:
        return {name: (f"import ended the process ({result.outcome})", None) for name in modules[:1]}
    answers = json.loads(result.channel)
    return {name: (why[0], tuple(why[1]) if why[1] else None) for name, why in answers.items() if why}


def _importable(baseline: Baseline, roots: Sequence[str]) -> tuple[str, ...]:
    names = []
    for path in baseline.package_files:
        root = next((r for r in sorted(roots, key=len, reverse=True) if path.startswith(r + "/")), "")
        parts = PurePosixPath(path[len(root) :].lstrip("/")).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if path.endswith(".py") and parts[-1] != "__main__" and all(part.isidentifier() for part in parts):
            names.append(".".join(parts))
    with open_sandbox(baseline.spec) as sandbox:
        failed = failed_imports(sandbox, names)
    return tuple(name for name in names if name not in failed)


def _environment(described: project.Project, extra: Sequence[str]) -> Environment:
    """Pins for the package and its tests. Test requirements are a wish: those that cannot be had are given up."""
    needed = [*described.requirements, *extra]
    wishes = [*described.test_requirements]
    relaxed = [re.split(r"[\s<>=!~;(]", text)[0] for text in wishes]
    for tried in (wishes, relaxed, []):
        try:
            pins = resolve([*needed, *tried], python=project.PYTHON)
            break
        except TaskError:
            if not tried:
                raise
    ours = described.distribution.partition("==")[0]
    return Environment(
        python=project.PYTHON,
        requirements=tuple(pin for pin in pins if pin.partition("==")[0] != ours),
        packages=described.packages,
        source_roots=described.source_roots,
        distribution=described.distribution,
        entry_points=described.entry_points,
    )


def _complain(name: str, run: TestRun, timeout_s: float) -> None:
    """Raises a TaskError for a run that says nothing about the tests."""
    if run.timed_out:
        raise TaskError(
            f"{name}: its tests take longer than {timeout_s:.0f} s; raise timeout_s, or choose another repository"
        )
    if not run.outcomes and not run.collection_errors:
        raise TaskError(
            f"{name} has no tests that pytest finds; a source needs its test suite (some sdists leave it out)"
        )
    if not run.outcomes:
        raise TaskError(_failing(name, run, set()))
    if run.integrity:
        raise TaskError(f"{name}: the run of its tests cannot be believed: {'; '.join(run.integrity)}")


def _failing(name: str, run: TestRun, broken: set[str]) -> str:
    errors = [
        f"{path}: {text.strip().splitlines()[-1]}"
        for path, text in run.collection_errors.items()
        if text.strip()
    ]
    errors += [
        f"{test}: {run.messages[test].rpartition(': ')[2][:200]}"
        for test in sorted(broken)
        if test in run.messages
    ]
    text = " ".join([*run.collection_errors.values(), *run.messages.values()])
    missing = sorted(set(re.findall(r"No module named '(\w+)", text)))
    lines = [
        f"{name}: its tests do not run here ({len(broken)} fail, {len(run.collection_errors)} files are not collected)"
    ]
    lines += [f"    {error}" for error in errors[:4]]
    if missing:
        wanted = json.dumps([IMPORTED_AS.get(module, module) for module in missing])
        lines.append(f"Modules are missing; add them with --set 'extra_requirements={wanted}'")
    return "\n".join(lines)
