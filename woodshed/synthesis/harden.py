"""Harder children of tasks that are solved, each proven as its parent was.

A child is drafted from its parent's folder alone: the original repository is the workspace with the gold patch and
the original tests laid over it. The draft is then proven: its hidden tests fail and the gold patch passes (the verifier
that judges attempts says so), the visible tests pass, nothing leaks, and it is expected to be solved less often.

    H1 combine     a second, disjoint deletion            H7 strengthen  more hidden cases, answered by the gold code
    H2 widen       a neighbour in the same file goes too  H8 drift       the name changes everywhere
    H3 deepen      the whole function goes, not its body  H9 context     look-alikes beside it
    H4 hide        a sentence instead of a description    H10 sequence   what uses it goes too, asked for in steps
    H5 spread      users in other files go too            H11 failure    starts from an attempt that failed
    H6 constrain   nothing new may be imported            H12 tools      no test command

Where a pool is too hard, two inverses make easier ones: E1 leaves only the target's body out, E2 tells what is tested.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from woodshed.curriculum.posterior import sigmoid
from woodshed.grading.session import run_tests, with_runner
from woodshed.pysource import syntax
from woodshed.records import Decoy, Rollout, Task, TaskError, Verdict
from woodshed.runs.files import write_atomically
from woodshed.runs.folder import RunDir
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.synthesis import leaks, stubs, task_variants
from woodshed.synthesis.leaks import evidence
from woodshed.synthesis.recheck import check
from woodshed.synthesis.repository_context import GENERATOR, lay
from woodshed.synthesis.task_variants import Parent, VariantDraft
from woodshed.synthesis.visibility import command_for
from woodshed.tasks import folder
from woodshed.tasks.environment import sandbox_spec

EFFECTS = {
    **{"H1": 1.2, "H2": 1.0, "H3": 0.9, "H4": 0.9, "H5": 1.2, "H6": 0.8},
    **{"H7": 0.8, "H8": 0.8, "H9": 0.8, "H10": 1.3, "H11": 0.9, "H12": 0.8},
    **{"E1": -1.5, "E2": -1.0},
}
"""Expected drop of the log-odds of a solve per operator; guesses until attempts have been measured."""
MIN_DROP = 0.15
"""Of the expected solve rate; a child that is hardly harder is not worth its proofs. An easier one only has to be
easier."""
DRAFTS: dict[str, Callable[[Parent, Sequence[Parent], random.Random], Iterator[VariantDraft]]] = {
    "H1": task_variants.combine,
    "H2": task_variants.widen,
    "H3": task_variants.deepen,
    "H4": task_variants.hide,
    "H5": task_variants.spread,
    "H6": task_variants.constrain,
    "H7": task_variants.strengthen,
    "H8": task_variants.drift,
    "H9": task_variants.distract,
    "H10": task_variants.sequence,
    "H11": task_variants.resume_failure,
    "H12": task_variants.withhold_command,
    "E1": task_variants.narrow,
    "E2": task_variants.explain,
}
HARDER = tuple(name for name in DRAFTS if name.startswith("H"))
EASIER = tuple(name for name in DRAFTS if name.startswith("E"))

Progress = Callable[[int, int, str], None]


@dataclass
class HardenReport:
    """Outcome of hardening."""

    accepted: list[Task] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    """Number of drafts by "operator: reason"."""
    tried: Counter[str] = field(default_factory=Counter)
    """Number of drafts by operator."""


@dataclass(frozen=True)
class AttemptOutcomes:
    """Results of attempts at some tasks."""

    rates: Mapping[str, float] = field(default_factory=dict)
    """Solve rate by task name."""
    failures: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """Files of one failed attempt by task name; H11 needs them."""


class Unproven(Exception):
    """A draft that is no task, with the reason."""


def harden(
    tasks: Sequence[Task],
    out: Path,
    *,
    operators: Sequence[str] = HARDER,
    attempts: AttemptOutcomes | None = None,
    limit: int = 0,
    seed: int = 0,
    sandboxes: SandboxProvider = BUBBLEWRAP,
    progress: Progress = lambda done, total, text: None,
) -> HardenReport:
    """Children in `out`, a folder each; at most one per parent and operator. What is there already is kept.

    Args:
        attempts: outcomes of attempts, where known; else a solve rate of 0.8 is assumed of a parent.
        limit: most children; 0 makes all.

    Raises:
        TaskError: an unknown operator.
    """
    if unknown := sorted(set(operators) - set(DRAFTS)):
        raise TaskError(f"no operator {unknown[0]!r}; known: {', '.join(DRAFTS)}")
    report = HardenReport()
    known = attempts or AttemptOutcomes()
    parents = [Parent.open(task, dict(known.failures.get(task.name, {})), sandboxes) for task in tasks]
    turns = [(parent, operator) for operator in operators for parent in parents]
    with folder.claimed(out):
        for done, (parent, operator) in enumerate(turns):
            progress(done, len(turns), f"hardening, {len(report.accepted)} children")
            if limit and len(report.accepted) >= limit:
                break
            home = out / f"{parent.task.name}-{operator}"
            if home.exists():
                report.accepted.append(folder.load(home))
                continue
            rate = known.rates.get(parent.task.name, 0.8)
            _one_child(parent, parents, operator, rate, home, seed, report)
    progress(len(turns), len(turns), "hardening")
    return report


def _one_child(
    parent: Parent,
    parents: Sequence[Parent],
    operator: str,
    rate: float,
    home: Path,
    seed: int,
    report: HardenReport,
) -> None:
    """The first draft that can be proven becomes the child."""
    draw = random.Random(f"{seed}/{operator}/{parent.task.name}")
    expected = sigmoid(math.log(rate / (1 - rate)) - EFFECTS[operator]) if 0 < rate < 1 else rate - 0.3 * rate
    if EFFECTS[operator] > 0 and rate - expected < MIN_DROP:
        report.rejected[f"{operator}: expected to be hardly harder"] += 1
        return
    for tries, draft in enumerate(DRAFTS[operator](parent, parents, draw)):
        report.tried[operator] += 1
        try:
            with tempfile.TemporaryDirectory(prefix=".harden-", dir=home.parent) as scratch:
                child = prove(parent, draft, Path(scratch) / home.name, round(expected, 3))
                child.folder.rename(home)
            report.accepted.append(dataclasses.replace(child, folder=home))
            return
        except (Unproven, TaskError) as reason:
            report.rejected[f"{operator}: {str(reason)[:60]}"] += 1
        if tries == 3:
            return


def prove(parent: Parent, draft: VariantDraft, home: Path, expected: float = 0.0) -> Task:
    """Make a proven task from the draft.

    Raises:
        Unproven: with the reason.
    """
    task = parent.task
    _without_copy(parent, draft)
    with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
        workspace, hidden = _lay_out(parent, draft, Path(scratch))
        ids = [*task.fail_to_pass, *task.pass_to_pass, *draft.more_ids]
        failing = _failing(parent, workspace, hidden, ids)
        lost = tuple(test for test in ids if test in failing)
        gold = {path: text for path, text in draft.gold.items() if text != _shown(workspace, path)}
        child = dataclasses.replace(
            task,
            instruction=draft.instruction,
            fail_to_pass=lost,
            stub_passes=_with_stubs(parent, workspace, hidden, gold, lost),
            decoys=_decoys(task, lost, draft.hidden),
            pass_to_pass=tuple(test for test in ids if test not in failing),
            operator=f"{task.operator}+{draft.operator}",
            level=max(task.level, draft.level),
            target_symbol=draft.symbol or task.target_symbol,
            test_command=_visible_tests(parent, workspace, ids, draft.command or task.test_command),
            provenance=_provenance(task, draft, expected),
        )
        if not lost:
            raise Unproven("no hidden test fails")
        tests = {str(p.relative_to(hidden)): p.read_bytes() for p in hidden.rglob("*") if p.is_file()}
        written = folder.write(
            child,
            home,
            workspace=workspace,
            tests=tests,
            gold={p: None if text is None else syntax.write(p, text) for p, text in gold.items()},
        )
    if reasons := check(written, parent.sandboxes):
        raise Unproven(f"not proven: {reasons[0].partition(': ')[2]}")
    if leak := leaks.first_leak(written, parent.sandboxes, tests=False):  # `check` has looked for the tests
        raise Unproven(f"leaks: {leak}")
    return written


def _without_copy(parent: Parent, draft: VariantDraft) -> None:
    """Refuse to take away what the parent has, and a library too.

    Raises:
        Unproven: with the place of the copy.
    """
    for path, shown in draft.shown.items():
        before = parent.before.get(path) if path not in parent.shown else parent.shown[path]
        for name in evidence.missing(before or "", shown or ""):
            if where := parent.copies.get((path, name)):
                raise Unproven(f"leaks: {name} of {path} also stands in {where}")


def _decoys(task: Task, failing: Iterable[str], changed: Iterable[str]) -> tuple[Decoy, ...]:
    """The parent's decoys of tests that still fail, in files that the variant leaves as they are."""
    tests, files = {test.partition("[")[0] for test in failing}, set(changed)
    return tuple(d for d in task.decoys if d.test in tests and d.test.partition("::")[0] not in files)


def _lay_out(parent: Parent, draft: VariantDraft, scratch: Path) -> tuple[Path, Path]:
    """Folders of the variant's workspace and of its hidden tests."""
    workspace, hidden = scratch / "workspace", scratch / "hidden"
    shutil.copytree(folder.workspace(parent.task), workspace, symlinks=True)
    for path, text in {**{p: parent.before[p] for p in parent.shown}, **draft.shown}.items():
        _put(workspace, path, None if text is None else syntax.write(path, text))
    for path, data in folder.protected_files(parent.task).items():
        _put(hidden, path, data)
    for path, text in draft.hidden.items():
        _put(hidden, path, syntax.write(path, text))
    return workspace, hidden


def _provenance(parent: Task, draft: VariantDraft, expected: float) -> dict[str, Any]:
    return {
        **parent.provenance,
        "generator": GENERATOR,
        "parent": parent.id,
        "parent_symbol": parent.target_symbol,
        "hardened_by": draft.operator,
        "expected_solve_rate": expected,
    }


def _failing(parent: Parent, workspace: Path, hidden: Path, ids: Sequence[str]) -> frozenset[str]:
    """Tests that do not pass before any edit, and again do not, under another hash seed."""
    task = parent.task
    spec = dataclasses.replace(sandbox_spec(task), lowers=(workspace, hidden))
    failing: list[set[str]] = []
    for hash_seed in (0, 2):
        with parent.sandboxes.open(with_runner(spec)) as sandbox:
            run = run_tests(
                sandbox,
                ids=list(ids),
                packages=task.environment.packages,
                timeout_s=task.verify_timeout_s,
                hash_seed=hash_seed,
                options=task.environment.pytest_options,
            )
        if not run.started or run.timed_out or run.integrity:
            raise Unproven(f"the tests could not be run: {'; '.join(run.integrity) or 'timeout'}")
        failing.append({test for test, outcome in run.outcomes.items() if outcome != "passed"})
    if failing[0] != failing[1]:
        raise Unproven("failures differ between two runs")
    return frozenset(failing[0])


def _with_stubs(
    parent: Parent, workspace: Path, hidden: Path, gold: Mapping[str, str | None], failing: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Failing tests that pass with a stub, by its kind.

    Raises:
        Unproven: all of them do.
    """
    task = parent.task
    spec = dataclasses.replace(sandbox_spec(task), lowers=(workspace, hidden))
    shown = {path: _shown(workspace, path) for path in gold if path.endswith(".py")}
    passing: dict[str, tuple[str, ...]] = {}
    for kind, texts in stubs.stubs({path: gold[path] for path in shown}, shown).items():
        with parent.sandboxes.open(with_runner(spec)) as sandbox:
            lay(sandbox, texts)
            environment, limit_s = task.environment, task.verify_timeout_s
            options = environment.pytest_options
            run = run_tests(
                sandbox, ids=failing, packages=environment.packages, timeout_s=limit_s, options=options
            )
        passing[kind] = tuple(test for test in failing if run.outcomes[test] == "passed")
        if failing and len(passing[kind]) == len(failing):
            raise Unproven(f"the hidden tests accept {stubs.KINDS[kind]}")
    return passing


def _visible_tests(parent: Parent, workspace: Path, ids: Sequence[str], command: str) -> str:
    """Take failing tests out of the visible files; return the command that runs the others.

    Raises:
        Unproven: no visible test passes.
    """
    task = parent.task
    spec = with_runner(dataclasses.replace(sandbox_spec(task), lowers=(workspace,)))
    there = [test for test in ids if (workspace / test.partition("::")[0]).is_file()]
    options, limit_s = task.environment.pytest_options, task.verify_timeout_s
    with parent.sandboxes.open(spec) as sandbox:
        run = run_tests(sandbox, ids=there, packages=(), timeout_s=limit_s, options=options)
    bad = {test for test, outcome in run.outcomes.items() if outcome in ("failed", "error")}
    passing: list[str] = []
    for path in sorted({test.partition("::")[0] for test in there}):
        mine = [test for test in there if test.startswith(f"{path}::")]
        shown = _shown(workspace, path)
        text = None if shown is None else task_variants.without_tests(shown, bad)
        if text is None or path in run.collection_errors:
            (workspace / path).unlink()
            continue
        _put(workspace, path, syntax.write(path, text))
        passing += [path] if any(run.outcomes[test] == "passed" for test in mine) else []
    with parent.sandboxes.open(spec) as sandbox:
        for tried in (command, *(command_for("-q", path) for path in passing)):
            if sandbox.exec(tried, timeout_s=limit_s).outcome == "ok":
                return tried
    raise Unproven("no visible test passes")


def _shown(workspace: Path, path: str) -> str | None:
    """Text of the file; None if there is none that can be read."""
    file = workspace / path
    try:
        return syntax.read(path, file.read_bytes()) if file.is_file() else None
    except syntax.UnreadableError:
        return None


def _put(root: Path, path: str, data: bytes | None) -> None:
    target = root / path
    if data is None:
        target.unlink(missing_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


def outcomes_of(run: Path) -> AttemptOutcomes:
    """The outcomes of the attempts in a run folder."""
    kept = RunDir.open(run)
    verdicts = {v.rollout_id: v for _, _, v in kept.read("verdicts", Verdict) if v.status == "graded"}
    counts: dict[str, list[int]] = {}
    failures: dict[str, dict[str, str | None]] = {}
    for _, _, rollout in kept.read("rollouts", Rollout):
        if (verdict := verdicts.get(rollout.id)) is None:
            continue
        tally = counts.setdefault(rollout.task_name, [0, 0])
        tally[0] += 1
        tally[1] += verdict.solved
        if not verdict.solved and rollout.patch.files:
            failures.setdefault(rollout.task_name, dict(rollout.patch.files))
    return AttemptOutcomes({name: solved / tried for name, (tried, solved) in counts.items()}, failures)


def write_report(report: HardenReport, path: Path) -> None:
    """Write the report of a background generator for the run that started it."""
    made = Counter(task.provenance["hardened_by"] for task in report.accepted)
    known = {name: [made[name], report.tried[name]] for name in report.tried}
    write_atomically(path, json.dumps(known) + "\n")
