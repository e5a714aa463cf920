"""Proof of a candidate: a task, or one reason for its rejection. Cheap checks first; every run is in a sandbox.

Proven means: the package still imports and its commands still start; every hidden fail-to-pass test fails three times,
because of the deletion, and not each of them for a missing name alone (`stubs`); what the agent is shown passes; the
hidden tests notice most mutants of the original and accept no trivial answer; in the task's own folder the verifier
sees these tests fail, and all others pass; and with the original code back these, and all others that run it, pass.

Reason codes, in the order of the checks: cascade, syntax, undefined_name, import_broken, conftest_broken,
command_broken, leak, no_test_fails, wrong_reason, too_wide, trivial, weak_tests, visible_tests_fail,
test_command_fails, half_visible, unstable_failure, instruction_too_long, gold_fails, odd_name, not_text. At any time:
too_slow, and those in `repository_context.PASSING`, which later runs try again.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Mapping, Sequence, Set

from woodshed.grading import TestRun, outcomes_of
from woodshed.pysource import syntax
from woodshed.pysource.edits import parse
from woodshed.records import Decoy, Patch, Task
from woodshed.sandbox import Sandbox
from woodshed.synthesis import decoys, instructions, operators, paraphrase, stubs, visibility
from woodshed.synthesis.baseline import failed_imports, settled
from woodshed.synthesis.coverage_map import AT_IMPORT
from woodshed.synthesis.failures import HASH_SEEDS, Failures, what_fails
from woodshed.synthesis.leaks import first_copy
from woodshed.synthesis.leaks.evidence import missing
from woodshed.synthesis.names import unresolved
from woodshed.synthesis.operators import Deletion, Symbol
from woodshed.synthesis.repository_context import (
    Candidate,
    Rejected,
    RepositoryContext,
    complain_of_the_machine,
    lay,
)
from woodshed.tasks import folder

MAX_REPAIRS = 5
UNWRITTEN = "not written yet"
"""Placeholder for a draft's instruction and test command."""
MAX_MEASURED = 8
"""Most functions of one deletion whose tests' strength is measured."""
WIDTHS = (1, 1, 1, 2, 10, 4, 10)
"""By level, how many times `max_cascade` other definitions may go: a module takes its re-exports along."""
OF_ALL_TESTS = ("visible_tests_fail", "test_command_fails", "half_visible")
"""Reasons that may not hold once it is known which of the other tests fail."""
REPAIRABLE = ("NameError", "ImportError", "ModuleNotFoundError", "AttributeError")


def prove(work: RepositoryContext, candidate: Candidate) -> Task:
    """The candidate as a proven task in the staging folder.

    Raises:
        Rejected: with the reason code of the first check that failed.
    """
    return prove_deletion(work, candidate, _delete(work, candidate))


def prove_revert(work: RepositoryContext, candidate: Candidate, deletion: Deletion) -> Task:
    """The reversal of a commit, as a proven task in the staging folder.

    Raises:
        Rejected: with the reason code of the first check that failed.
    """
    _lint(work, deletion)
    gone = {work.code.modules[path].name for path in deletion.absent}
    with work.opened(deletion.changed) as sandbox:
        failed = failed_imports(sandbox, [m for m in work.baseline.modules if m not in gone])
    if failed:
        raise Rejected("import_broken", next(iter(failed.values()))[0])
    return prove_deletion(work, candidate, deletion)


def prove_deletion(work: RepositoryContext, candidate: Candidate, deletion: Deletion) -> Task:
    """A deletion that imports, as a proven task in the staging folder.

    Raises:
        Rejected: with the reason code of the first check that failed.
    """
    _without_copy(work, candidate, deletion)
    task = _stable_task(work, candidate, deletion)
    _check_gold(work, candidate, task)
    return task


def _stable_task(work: RepositoryContext, candidate: Candidate, deletion: Deletion) -> Task:
    """The task in its folder, where exactly its fail-to-pass tests fail; of a suite that does not fit into one run, as
    far as the task asks for its tests.

    Tests that do not run the removed code run once, in the task's own folder. If any of them fails there, the task is
    written a second time, with these tests proven like the others.
    """
    affected: set[str] = set()
    for is_last in (False, True):
        try:
            task = _written(work, candidate, deletion, affected)
        except Rejected as rejection:
            if is_last or rejection.reason not in OF_ALL_TESTS:
                raise
            affected = set(work.baseline.stable)
            continue
        others = work.baseline.stable if work.fits else task.pass_to_pass
        everything = tuple(test for test in others if test not in set(task.fail_to_pass))
        whole = dataclasses.replace(task, pass_to_pass=everything)
        before = outcomes_of(whole, Patch(files={}), work.sandboxes)
        failing = {test for test, outcome in before.outcomes.items() if outcome != "passed"}
        if not (unexpected := sorted(failing ^ set(task.fail_to_pass))):
            return task
        affected = failing
        shutil.rmtree(task.folder)
        complain_of_the_machine(before)
    raise Rejected("unstable_failure", f"different outcomes in the task's folder: {', '.join(unexpected)}")


def _check_gold(work: RepositoryContext, candidate: Candidate, task: Task) -> None:
    """Reject a task whose tests do not pass with the original code, and remove its folder."""
    covering = set(work.map.names(candidate.tests))
    passing = tuple(test for test in task.pass_to_pass if test in covering or not covering)
    near_task = dataclasses.replace(task, pass_to_pass=passing)
    verdict = outcomes_of(near_task, folder.gold_patch(task), work.sandboxes)
    if not verdict.solved:
        shutil.rmtree(task.folder)
        complain_of_the_machine(verdict)
        failed = [test for test, outcome in verdict.outcomes.items() if outcome != "passed"]
        raise Rejected("gold_fails", ", ".join([*verdict.integrity, *failed]))


def near(tests: Sequence[str], others: Sequence[str], command: str) -> tuple[str, ...]:
    """Those in files that hold one of the others or that the agent's test command runs."""
    files = {test.partition("::")[0] for test in others} | set(shlex.split(command))
    return tuple(test for test in tests if test.partition("::")[0] in files)


def _written(work: RepositoryContext, candidate: Candidate, deletion: Deletion, affected: Set[str]) -> Task:
    """The task in its folder, as far as the tests that run the code, and others that it affects, prove it."""
    failures = what_fails(work, candidate, deletion, affected)
    outcomes, lost, fail_to_pass = failures.outcomes, failures.lost, failures.fail_to_pass
    pass_to_pass = tuple(test for test in work.baseline.stable if test not in set(fail_to_pass))
    stub_passes = _with_stubs(work, deletion, fail_to_pass)
    strength = _strength(work, deletion, stubs.idle(stub_passes))
    visible, command = visibility.show(work, deletion, outcomes, candidate.name)
    if work.settings.pass_to_pass == "near":
        fail_to_pass, pass_to_pass = (near(tests, lost, command) for tests in (fail_to_pass, pass_to_pass))
    with work.opened({**deletion.changed, **failures.conftests.files}) as sandbox:
        again = work.run(sandbox, lost, hash_seed=HASH_SEEDS[1])
    if passed := [test for test in lost if again.outcomes[test] == "passed"]:
        raise Rejected("unstable_failure", ", ".join(passed))
    instruction = _instruction(work, deletion, command, failures)
    facts = {**_facts(work, deletion), **strength}
    task = _task(work, candidate, deletion, instruction, command, fail_to_pass, pass_to_pass, facts)
    task = dataclasses.replace(task, stub_passes=stub_passes, decoys=_decoys(work, candidate, lost))
    return _write(work, task, deletion, visible)


def _decoys(work: RepositoryContext, candidate: Candidate, fail_to_pass: Sequence[str]) -> tuple[Decoy, ...]:
    """Copies of the hidden tests that must fail, as they do with the original code."""
    files = {test.partition("::")[0] for test in fail_to_pass if test.partition("::")[0] in work.tests}
    sources = {path: (work.baseline.repository.tree / path).read_bytes() for path in sorted(files)}

    def run(changed: Mapping[str, bytes], tests: Sequence[str]) -> TestRun:
        with work.opened({}) as sandbox:
            return work.session(sandbox, tests, sources=changed)

    return decoys.search(sources, fail_to_pass, run, f"{work.settings.seed} {candidate.name}")


def _without_copy(work: RepositoryContext, candidate: Candidate, deletion: Deletion) -> None:
    """Reject removals of code that also exists elsewhere, which a candidate shows before any test runs.

    The gate looks again at the task itself: here nothing is known of the instruction and of which tests are visible.
    """
    for path, text in deletion.changed.items() if work.copies else ():
        for name in missing(work.code.texts.get(path, ""), text or ""):
            if where := work.copies.get((path, name)):
                raise Rejected("leak", f"{name} of {path} also stands in {where}")
    tests = tuple(work.map.names(candidate.tests)) or work.baseline.stable
    task = _task(work, candidate, deletion, UNWRITTEN, UNWRITTEN, tests, (), {})
    draft = _write(work, task, deletion, {})
    try:
        copied = first_copy(
            draft, {f"/workspace/{path}" for path in work.baseline.test_files}, work.sandboxes
        )
    finally:
        shutil.rmtree(draft.folder)
    if copied:
        raise Rejected("leak", copied)


# ---- the deleted state ------------------------------------------------------------------------------------


def _delete(work: RepositoryContext, candidate: Candidate) -> Deletion:
    """The deletion, repaired until every module imports again."""
    cascade = work.settings.max_cascade * WIDTHS[operators.LEVELS[candidate.operator]]
    try:
        deletion = operators.OPERATORS[candidate.operator](work.code, candidate.symbol, cascade)
        with work.opened({}) as sandbox:
            for _ in range(MAX_REPAIRS + 1):
                _lint(work, deletion)
                lay(sandbox, deletion.changed)
                gone = {work.code.modules[path].name for path in deletion.absent}
                failed = failed_imports(sandbox, [m for m in work.baseline.modules if m not in gone])
                if not failed:
                    _smoke(work, sandbox, deletion)
                    return operators.remove_interfaces(work.interfaces, deletion)
                error, place = next((why for why in failed.values() if why[1]), next(iter(failed.values())))
                if place is None or not deletion.removed or not error.startswith(REPAIRABLE):
                    raise Rejected("import_broken", error)
                deletion = operators.repair(work.code, deletion, *place, cascade)
    except operators.CascadeError as error:
        raise Rejected("cascade", str(error)) from None
    raise Rejected("import_broken", f"still after {MAX_REPAIRS} repairs: {error}")


def _lint(work: RepositoryContext, deletion: Deletion) -> None:
    """Check without running anything: edited text parses, and lacks no name but the removed ones."""
    for path, text in deletion.changed.items():
        if text is None or path not in work.code.texts:
            continue
        if not folder.is_clean(path):
            raise Rejected("odd_name", f"{path!r} is no name that a patch may change")
        if syntax.STRAY.search(work.code.texts[path]):
            raise Rejected("not_text", f"{path}: bytes in its comments are not of its encoding")
        if parse(text) is None:
            raise Rejected("syntax", f"the edited {path} does not parse")
        new = unresolved(text) - unresolved(work.code.texts[path]) - deletion.words
        new -= {name for where, name in deletion.removed if where == path}
        if new:
            raise Rejected("undefined_name", f"{path}: {', '.join(sorted(new))}")


def _smoke(work: RepositoryContext, sandbox: Sandbox, deletion: Deletion) -> None:
    """Commands that started before still do, but for those whose own function is what was taken away."""
    for command, entry in work.baseline.commands.items():
        module, _, function = entry.partition(":")
        home = work.code.by_name.get(module)
        own = {name for path, name in deletion.removed if home is not None and path == home.path}
        own |= {target.name for target in deletion.targets if target.module == module}
        if function.partition(".")[0] in own or any(
            work.code.modules[path].name == module for path in deletion.absent
        ):
            continue
        result = settled(sandbox.exec(command, timeout_s=120), command)
        if result.outcome != "ok" and not any(
            word in result.stderr.decode(errors="replace") for word in deletion.words
        ):
            raise Rejected("command_broken", f"{command}: {result.stderr[-200:].decode(errors='replace')}")


# ---- what fails, and why ----------------------------------------------------------------------------------


def _with_stubs(
    work: RepositoryContext, deletion: Deletion, failing: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Failing tests that pass with a stub, by its kind: they ask for names only."""
    original = {path: work.code.texts[path] for path in deletion.changed if path in work.code.texts}
    passing: dict[str, tuple[str, ...]] = {}
    for kind, texts in stubs.stubs(original, deletion.changed).items():
        with work.opened({**deletion.changed, **texts}) as sandbox:
            run = work.session(sandbox, failing, HASH_SEEDS[0])
        passing[kind] = tuple(test for test in failing if run.outcomes[test] == "passed")
        if len(passing[kind]) == len(failing):
            raise Rejected("trivial", f"{len(failing)} failing tests accept {stubs.KINDS[kind]}")
    return passing


def _strength(work: RepositoryContext, deletion: Deletion, idle: Set[str]) -> dict[str, object]:
    """The share of mutants that tests notice, over the functions that are missing; `idle` tests do not count."""
    functions = _functions(work, deletion)
    asked = {f: [t for t in work.map.names(work.survey.tests(f)) if t not in idle] for f in functions}
    functions = [function for function in functions if asked[function]][:MAX_MEASURED]
    measured = [work.strength(function, asked[function]) for function in functions]
    if measured and all(one.trivial for one in measured):
        raise Rejected("trivial", f"{functions[0].name}: the tests accept `{measured[0].trivial[0]}`")
    tried, noticed = sum(one.mutants for one in measured), sum(one.noticed for one in measured)
    if tried and noticed < work.settings.min_strength * tried:
        raise Rejected("weak_tests", f"{noticed} of {tried} mutants are noticed")
    equal = bool(measured) and all(one.accepts_equal for one in measured)
    return {"mutants": tried, "mutants_noticed": noticed, "accepts_equal_object": equal}


def _functions(work: RepositoryContext, deletion: Deletion) -> list[Symbol]:
    """The functions that are missing and that tests run, the methods of classes among them.

    What runs while a module is imported is left out: the probe comes too late for what it made.
    """
    functions: list[Symbol] = []
    for target in deletion.targets:
        inside = [
            s
            for s in work.survey.symbols
            if s.path == target.path and s.kind == "function" and s.name.startswith(f"{target.name}.")
        ]
        whole = [s for s in work.survey.symbols if s.binding == target.binding and s.kind == "function"]
        functions += [
            s for s in (*whole, *inside) if work.survey.tests(s) and not work.survey.tests(s) & AT_IMPORT
        ]
    return list({s.binding: s for s in functions}.values())


# ---- the task ---------------------------------------------------------------------------------------------


def _instruction(work: RepositoryContext, deletion: Deletion, command: str, failures: Failures) -> str:
    settings, failing = work.settings, failures.lost
    files = sorted({*(test.partition("::")[0] for test in failing), *failures.conftests.files})
    texts = [work.tests[path] for path in files if path in work.tests]
    needed = instructions.needed_names(deletion, work.code, texts)
    try:
        text = instructions.write(
            deletion,
            command,
            length=settings.length,
            max_words=settings.max_words,
            needed=needed,
            behaviours=instructions.behaviours_of(failing, work.tests),
        )
    except instructions.TooLongError as error:
        raise Rejected("instruction_too_long", str(error)) from None
    if not settings.wording_url:
        return text
    gold = "\n".join(work.code.texts[path] for path in deletion.changed if path in work.code.texts)
    wanted = paraphrase.Wanted(
        gold, needed, failing, "\n".join(texts), tuple(deletion.changed), deletion.level
    )
    return paraphrase.reword(text, wanted, paraphrase.endpoint(settings.wording_url, settings.wording_model))[
        0
    ]


def _facts(work: RepositoryContext, deletion: Deletion) -> dict[str, object]:
    """Facts about a task for statistics and the curriculum."""
    before = sum(work.code.texts[p].count("\n") for p in deletion.changed if p in work.code.texts)
    after = sum((text or "").count("\n") for p, text in deletion.changed.items() if p in work.code.texts)
    return {
        "lines_removed": max(before - after, 0),
        "files_changed": len(deletion.changed),
        "symbols_removed": len(deletion.targets),
        "length": work.settings.length,
        "visibility": work.settings.visibility,
    }


def _task(
    work: RepositoryContext,
    candidate: Candidate,
    deletion: Deletion,
    instruction: str,
    command: str,
    fail_to_pass: tuple[str, ...],
    pass_to_pass: tuple[str, ...],
    facts: Mapping[str, object],
) -> Task:
    return Task(
        id="",
        name=candidate.name,
        folder=work.staging / candidate.name,
        instruction=instruction,
        environment=work.baseline.environment,
        allowed_paths=work.baseline.allowed_paths,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        operator=deletion.operator,
        level=deletion.level,
        target_path=candidate.symbol.path,
        target_symbol=candidate.symbol.name,
        target_lines=deletion.gap,
        test_command=command,
        verify_timeout_s=work.settings.timeout_s,
        provenance={**work.provenance, **facts},
    )


def _write(
    work: RepositoryContext, task: Task, deletion: Deletion, visible: Mapping[str, str | None]
) -> Task:
    """The task's folder in staging: the deleted state, the original tests, the original code as gold patch."""
    tree = work.baseline.repository.tree
    workspace = work.staging / f".{task.name}"
    shutil.copytree(tree, workspace, symlinks=True)
    for path, text in {**deletion.changed, **visible}.items():
        if text is None:
            (workspace / path).unlink(missing_ok=True)
        else:
            (workspace / path).write_bytes(syntax.write(path, text))
    tests = {path: (tree / path).read_bytes() for path in work.baseline.test_files}
    gold: dict[str, bytes | None] = {path: (tree / path).read_bytes() for path in deletion.changed}
    written = folder.write(task, task.folder, workspace=workspace, tests=tests, gold=gold)
    shutil.rmtree(workspace)
    return written
