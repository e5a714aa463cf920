"""Baseline of a repository before anything is removed: its environment, and the tests that always pass."""

from __future__ import annotations

import configparser
import contextlib
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from woodshed.grading.results import TestRun
from woodshed.grading.session import with_runner
from woodshed.records import Environment, SandboxError, TaskError
from woodshed.sandbox import BUBBLEWRAP, Result, Sandbox, SandboxProvider, SandboxSpec
from woodshed.synthesis import advice, builds, pins, project, setup_command, suite
from woodshed.synthesis.configuration import refuse_what_pytest_refuses
from woodshed.synthesis.progress import Progress
from woodshed.synthesis.sources import Repository
from woodshed.synthesis.suite import LIMITS, SuiteLimits, SuiteRuns
from woodshed.tasks import environment as environments
from woodshed.tasks.environment import prepare
from woodshed.tasks.folder import is_protected

UNSTABLE_ID = re.compile(r"0x[0-9a-f]{6,}|/tmp/|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d")
"""Addresses, temporary paths and clock readings in a test id: another run would name the test differently."""
RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Failed|Warning|Interrupt)\b")
UNNAMEABLE = re.compile(r"\[|::")
"""Parts of a path that pytest, asked to run that file, takes for the parts of a test's id."""
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
    """Paths of the packages: a solution may change them."""
    package_files: tuple[str, ...]
    """Python and .pyi files of the packages, tests left out."""
    test_files: tuple[str, ...]
    """Python files of the tests, conftest files included."""
    generated: tuple[str, ...]
    """Files that the build added to the tree."""
    modules: tuple[str, ...] = ()
    """Import names of package files that can be imported here."""
    stable: tuple[str, ...] = ()
    """Tests that passed in every run, in the order they ran in."""
    broken: tuple[str, ...] = ()
    """Tests that failed in some run; they are not shown to the agent."""
    uncollected: tuple[str, ...] = ()
    """Test files that cannot be collected here."""
    durations: dict[str, float] = field(default_factory=dict)
    """Least seconds of a run, by stable test."""
    why: dict[str, str] = field(default_factory=dict)
    """Last line of the error, by broken test and by file that cannot be collected."""
    commands: dict[str, str] = field(default_factory=dict)
    """Commands that show their help and end well, to their entry point "module:function"."""
    timed: tuple[str, ...] = ()
    """Tests that judge how long something takes; like broken ones they are left out (`clocks`)."""
    slow: tuple[str, ...] = ()
    """Tests without which the others fit into the seconds of one run; left out like broken ones."""
    unmeasured: tuple[str, ...] = ()
    """Tests that time did not reach; left out like broken ones."""
    left_out: tuple[str, ...] = ()
    """Requirements of the repository that are not installed, each with the reason."""

    @property
    def spec(self) -> SandboxSpec:
        """A sandbox of the untouched repository in which `run_tests` can run."""
        return with_runner(
            SandboxSpec(
                lowers=(self.repository.tree,),
                environment=prepare(self.environment),
                env=environments.variables(self.environment),
            )
        )


def measure(
    repository: Repository,
    *,
    extra_requirements: Sequence[str] = (),
    variables: Sequence[str] = (),
    options: Sequence[str] = (),
    limits: SuiteLimits = LIMITS,
    kept: Path | None = None,
    progress: Progress = lambda done, total, text: None,
    sandboxes: SandboxProvider = BUBBLEWRAP,
) -> Baseline:
    """Build the environment of a repository and run its suite several times, with different hash seeds.

    The runs take place at the same time, so that tests that depend on the clock fail here rather than later.

    Args:
        variables: as in `Environment`; `options` are its `pytest_options`.
        kept: folder of what earlier calls found; without one nothing is kept.

    Raises:
        TaskError: a broken build, no tests, tests that do not import or fail, or that import another copy.
    """
    draft, described = _draft_of(repository, extra_requirements, variables, options, progress, sandboxes)
    name = repository.name
    with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
        measured = suite.measure(draft, kept or Path(scratch), limits, progress, sandboxes)
    for run in measured.runs:
        _complain(repository, run, limits.timeout_s * limits.runs, described)
    stable, broken = _split(measured, draft, described)
    left_out = f", without {len(broken)} that failed, such as {min(broken)}" if broken else ""
    progress(0, 0, f"importing the modules of {name}, {len(stable)} stable tests{left_out}")
    return replace(
        draft,
        modules=_importable(draft, sandboxes),
        commands=_commands(draft, sandboxes),
        stable=tuple(stable),
        broken=tuple(sorted({*broken, *measured.unmeasured})),
        uncollected=tuple(sorted({path for run in measured.runs for path in run.collection_errors})),
        durations={t: min(run.durations.get(t, 0.0) for run in measured.runs) for t in stable},
        unmeasured=measured.unmeasured,
        why=_reasons(measured, broken),
        test_files=tuple(sorted({*draft.test_files, *(test.partition("::")[0] for test in stable)})),
    )


def _draft_of(
    repository: Repository,
    extra_requirements: Sequence[str],
    variables: Sequence[str],
    options: Sequence[str],
    progress: Progress,
    sandboxes: SandboxProvider,
) -> tuple[Baseline, project.Project]:
    """The repository built and its environment resolved, its tests not yet run."""
    name = repository.name
    progress(0, 0, f"building {name}, at most {builds.BUILD_TIMEOUT_S:.0f} s")
    described = project.read(repository, sandboxes=sandboxes)
    progress(0, 0, f"preparing the environment of {name}")
    environment, described = pins.environment_of(described, extra_requirements, sandboxes)
    environment = replace(environment, variables=tuple(variables), pytest_options=tuple(options))
    made = setup_command.run(repository, environment, sandboxes)
    described = replace(described, generated=(*described.generated, *made))
    for reason in described.left_out:
        progress(0, 0, f"preparing the environment of {name}, not installed: {reason}")
    return _draft(repository, described, environment), described


def _last_line(text: str) -> str:
    """The last line of an error that names it, else the last line: pytest explains assertions below them."""
    lines = [line.removeprefix("E ").strip() for line in text.strip().splitlines()] or ["no reason was given"]
    return next((line for line in reversed(lines) if RAISED.match(line)), lines[-1])


def _reasons(measured: SuiteRuns, broken: Iterable[str]) -> dict[str, str]:
    """Reason by broken test and by file that cannot be collected: the last line of its error."""
    reasons = dict[str, str]()
    for run in measured.runs:
        for path, text in run.collection_errors.items():
            reasons.setdefault(path, _last_line(text))
        for test in broken:
            if test in run.messages:
                reasons.setdefault(test, run.messages[test])
    return reasons | measured.aside


def _split(measured: SuiteRuns, draft: Baseline, described: project.Project) -> tuple[list[str], set[str]]:
    """Tests that passed in every run, and tests that failed in some or that no run survived.

    Raises:
        TaskError: more tests fail than pass, or none imports the packages.
    """
    name, runs = draft.repository.name, measured.runs
    tests = {test for run in runs for test in run.outcomes}
    broken = {test for test in tests if any(run.outcomes.get(test) in ("failed", "error") for run in runs)}
    broken |= measured.aside.keys()
    stable = _stable(runs, draft.test_files)
    if not stable or len(broken) > len(stable):
        raise TaskError(advice.failing(name, runs[0], broken, described))
    if not any(runs[0].package_files.values()):
        packages = ", ".join(described.packages)
        raise TaskError(f"{name}: its tests never import {packages}, so they cannot judge it")
    return stable, broken


def _stable(runs: Sequence[TestRun], test_files: Sequence[str]) -> list[str]:
    """Tests that passed in every run and whose ids and files can be named on a command line."""
    passed = [t for t in runs[0].outcomes if all(run.outcomes.get(t) == "passed" for run in runs)]
    unnameable = tuple(f"{path}::" for path in test_files if UNNAMEABLE.search(path))
    return [test for test in passed if not UNSTABLE_ID.search(test) and not test.startswith(unnameable)]


def _draft(repository: Repository, described: project.Project, environment: Environment) -> Baseline:
    """Baseline without the results of its tests."""
    files = sorted(p.relative_to(repository.tree).as_posix() for p in repository.tree.rglob("*.py*"))
    files = [path for path in files if path.endswith((".py", ".pyi"))]
    tests = [path for path in files if is_protected(path) and path.endswith(".py")]
    inside = [p for p in files if any(p == home or p.startswith(home + "/") for home in described.paths)]
    package = [path for path in inside if not is_protected(path)]
    return Baseline(
        repository,
        environment,
        described.paths,
        tuple(package),
        tuple(tests),
        described.generated,
        left_out=described.left_out,
    )


def settled(result: Result, what: str) -> Result:
    """A result that says something about the code that ran, not about the machine.

    Raises:
        TimeoutError: it was ended by the clock.
        SandboxError: its sandbox was lost.
    """
    if result.outcome == "timeout":
        raise TimeoutError(f"{what} took longer than {result.seconds:.0f} s")
    if result.outcome == "sandbox_lost":
        raise SandboxError(f"the sandbox was lost: {what}")
    return result


def failed_imports(sandbox: Sandbox, modules: Sequence[str]) -> dict[str, tuple[str, tuple[str, int] | None]]:
    """Modules that cannot be imported, with the error and the (path, line) of the statement of ours that failed.

    Raises:
        TimeoutError, SandboxError: as `settled`.
    """
    command = ["/env/bin/python", "-c", IMPORT_ALL]
    given = json.dumps(list(modules)).encode()
    result = settled(sandbox.exec(command, stdin=given, timeout_s=120, channel=True), "importing all modules")
    if not result.channel:
        return {name: (f"import ended the process ({result.outcome})", None) for name in modules[:1]}
    answers = json.loads(result.channel)
    return {name: (why[0], tuple(why[1]) if why[1] else None) for name, why in answers.items() if why}


def _importable(baseline: Baseline, sandboxes: SandboxProvider) -> tuple[str, ...]:
    roots = sorted(baseline.environment.source_roots, key=len, reverse=True)
    names = []
    for path in baseline.package_files:
        root = next((root for root in roots if path.startswith(root + "/")), "")
        parts = PurePosixPath(path[len(root) :].lstrip("/")).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if path.endswith(".py") and parts[-1] != "__main__" and all(part.isidentifier() for part in parts):
            names.append(".".join(parts))
    with sandboxes.open(baseline.spec) as sandbox:
        try:
            failed = failed_imports(sandbox, names)
        except TimeoutError as error:
            raise TaskError(f"{baseline.repository.name}: {error}") from None
    return tuple(name for name in names if name not in failed)


def _commands(baseline: Baseline, sandboxes: SandboxProvider) -> dict[str, str]:
    """`--help` of the scripts that the distribution installs, and of the packages that can be run."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    with contextlib.suppress(configparser.Error):
        parser.read_string(baseline.environment.entry_points)
    scripts = dict(parser["console_scripts"]) if parser.has_section("console_scripts") else {}
    wanted = {f"{name} --help": entry.partition("[")[0].strip() for name, entry in scripts.items()}
    for path in baseline.package_files:
        place, _, name = path.rpartition("/")
        for package in baseline.environment.packages if name == "__main__.py" else ():
            if f"/{place}".endswith(f"/{package.replace('.', '/')}"):
                wanted[f"python -m {package} --help"] = f"{package}.__main__:"
    with sandboxes.open(baseline.spec) as sandbox:
        return {c: entry for c, entry in wanted.items() if sandbox.exec(c, timeout_s=30).outcome == "ok"}


def _complain(repository: Repository, run: TestRun, timeout_s: float, described: project.Project) -> None:
    """Raise a TaskError for a run that says nothing about the tests."""
    name = repository.name
    if not run.outcomes:
        with builds.named(name):
            refuse_what_pytest_refuses(repository.tree)
    if run.timed_out:
        raise TaskError(
            f"{name}: its tests take longer than {timeout_s:.0f} s; raise timeout_s, or choose another repository"
        )
    if not run.outcomes and not run.collection_errors and not advice.ERROR.search(run.log):
        raise TaskError(
            f"{name} has no tests that pytest finds; a source needs its test suite (some sdists leave it out)"
        )
    if not run.outcomes:
        raise TaskError(advice.failing(name, run, set(), described))
    if run.integrity:
        raise TaskError(f"{name}: the run of its tests cannot be believed: {'; '.join(run.integrity)}")
