"""Two runs side by side: what may be compared, who won, and what `woodshed eval compare` exits with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from woodshed.agent.attempt import AgentSettings
from woodshed.cli import app
from woodshed.evals import behaviour, comparison, effort, manifest, measures
from woodshed.grading.verifier import GradingSettings
from woodshed.records import Call, Flag, Observation, Patch, Rollout, RunError, Turn, Verdict
from woodshed.runs.folder import RunDir

SCORE: dict[str, Any] = {
    "tools": "t0",
    "prompt": "p0",
    "harness": "h0",
    "agent": {"max_turns": 6},
    "temperature": 1.0,
    "grading": {"shaped": False},
    "resources": {"memory_mb": 2048},
    "engine": {"name": "transformers"},
    "attempts": 1,
    "seed": 0,
    "tasks": {f"task-{n}": str(n) for n in range(20)},
}
MANIFEST: dict[str, Any] = {
    "woodshed": "0.1.0",
    "revision": "abc",
    "packages": {"torch": "2.13.0"},
    "score": SCORE,
}


def attempt(task: int, solved: bool, *, void: bool = False, tokens: int = 3) -> tuple[Rollout, Verdict]:
    turn = Turn((1, 2), 1, (5,) * tokens, (-0.5,) * tokens, ((0, tokens),), "stop", "", (), (), None)
    ended = "sandbox_lost" if void else "finished"
    made = Rollout(f"eval-0-task-{task}-0", str(task), f"task-{task}", 0, 0, (turn,), Patch({}), ended, 1.0)
    status = "invalid" if void else "graded"
    return made, Verdict(made.id, made.task_id, status, float(solved), solved, {})


def make_run(
    path: Path, solved: set[int], *, void: tuple[int, ...] = (), count: int = 20, **changes: Any
) -> RunDir:
    kept = copy.deepcopy(MANIFEST)
    kept["score"] |= changes
    run = RunDir.create(path, recipe=f'name = "{path.name}"\n', manifest=kept)
    made = [attempt(n, n in solved, void=n in void) for n in range(count)]
    run.append("rollouts", [rollout for rollout, _ in made], "eval", 0)
    run.append("verdicts", [verdict for _, verdict in made], "eval", 0)
    run.unlock()
    return run


def woodshed(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_tasks_won_and_lost(tmp_path: Path):
    a, b = make_run(tmp_path / "a", {0, 1, 2}), make_run(tmp_path / "b", {1, 2, *range(5, 15)}, void=(19,))
    found = comparison.compare([a], [b])
    assert found.refusals == () and found.warnings == () and found.num_void == (0, 1)
    assert found.lost == ("task-0",) and len(found.won) == 10 and "task-5" in found.won
    solved = next(row for row in found.rows if row.measure.key == "solved")
    assert solved.change.num_tasks == 19, "a void attempt is in no figure, so its task has no partner"
    assert (solved.record.up, solved.record.down, solved.record.same) == (10, 1, 8)
    assert solved.change.is_clear and solved.change.detectable is not None
    result = woodshed("eval", "compare", str(a.path), str(b.path))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "B against A. Better beyond noise: solve rate rose from 3 of 20 to 12 of 19 and mean reward"
    )
    assert "won 10, lost 1, same 8; exact test of won against lost (McNemar): p = 0.0117" in result.stdout
    assert "void attempts, in no figure: A 0, B 1" in result.stdout and "smallest detectable" in result.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": {"max_turns": 12}}, "budgets and tool settings: max_turns: 6 against 12"),
        ({"tools": "t1"}, "the tools that the policy is offered: t0 against t1"),
        ({"temperature": 0.7}, "the sampling temperature: 1.0 against 0.7"),
        ({"resources": {"memory_mb": 512}}, "the limits of a sandbox: memory_mb: 2048 against 512"),
        ({"tasks": {"task-3": "other"}}, "1 tasks of the same name differ in content: task-3"),
    ],
)
def test_runs_that_differ_in_what_makes_a_score_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    a, b = make_run(tmp_path / "a", {0}), make_run(tmp_path / "b", {1}, **changes)
    result = woodshed("eval", "compare", str(a.path), str(b.path))
    assert result.exit_code == 1 and f"not comparable: {message}" in result.stderr and result.stdout == ""
    anyway = woodshed("eval", "compare", str(a.path), str(b.path), "--anyway")
    assert anyway.exit_code == 0 and message in anyway.stderr and "solve rate" in anyway.stdout


def test_what_a_reader_should_know_is_a_warning(tmp_path: Path):
    a = make_run(tmp_path / "a", {0})
    b = make_run(tmp_path / "b", {1}, harness="h1", seed=7, count=18)
    warnings = comparison.compare([a], [b]).warnings
    assert "the harness's source: h0 against h1" in warnings and "the sampling seed: 0 against 7" in warnings
    assert "2 tasks were attempted on one side only and are left out" in warnings
    (b.path / "manifest.json").unlink()
    assert any("has no record" in warning for warning in comparison.compare([a], [b]).warnings)


def test_nothing_in_common_and_nothing_measured(tmp_path: Path):
    a, empty = make_run(tmp_path / "a", {0}), make_run(tmp_path / "b", set(), count=0)
    assert woodshed("eval", "compare", str(a.path), str(empty.path)).exit_code == 2
    with pytest.raises(RunError, match="holds no finished evaluation"):
        comparison.compare([a], [empty])


def test_seeds_of_an_arm_are_given_with_commas(tmp_path: Path):
    names = [str(make_run(tmp_path / f"a{n}", set(range(4 + n))).path) for n in range(2)]
    others = [str(make_run(tmp_path / f"b{n}", set(range(10 + n))).path) for n in range(2)]
    result = woodshed("eval", "compare", ",".join(names), ",".join(others))
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if line.startswith("solve rate "))
    assert "22.5%" in line and "52.5%" in line and "+30.0 pp" in line


def test_what_made_a_score_is_kept_once_and_changes_are_said(tmp_path: Path):
    run = RunDir.create(tmp_path / "a", recipe="", manifest={"python": "3.11"})
    manifest.keep(run, SCORE)
    manifest.keep(run, SCORE | {"tasks": {}})
    assert run.manifest["score"] == SCORE and "changed" not in run.manifest
    manifest.keep(run, SCORE | {"seed": 3})
    assert run.manifest["score"] == SCORE and run.manifest["changed"] == ["seed"]


def test_a_score_names_what_it_depends_on(tiny_task):
    from tiny_model import tiny_tokenizer

    from woodshed.engines.scripted import ScriptedEngine
    from woodshed.tokens.renderer import create_renderer

    sampler = ScriptedEngine(create_renderer(tiny_tokenizer(), codec="plain"), [])
    settings = AgentSettings(), GradingSettings()
    found = manifest.score(sampler, [tiny_task], *settings, attempts=2, seed=1)
    again = manifest.score(sampler, [tiny_task], *settings, attempts=2, seed=1)
    assert found == again and found["tasks"] == {tiny_task.name: tiny_task.id}
    assert set(manifest.DECISIVE) | set(manifest.INCIDENTAL) <= set(found)
    more = manifest.score(sampler, [tiny_task], AgentSettings(max_calls=2), settings[1], attempts=2, seed=1)
    assert more["prompt"] != found["prompt"], "the rule on calls is part of the prompt"


# -- behaviour and effort ------------------------------------------------------------------------------------------


def tool_turn(tool: str, error: str | None = None, text: str = "", **arguments: Any) -> Turn:
    call = Call("1", tool, arguments, "<call>", None)
    seen = Observation("1", "", error, 0.5)  # type: ignore[arg-type]
    return Turn(
        (1,) * 4,
        1,
        (5, 6),
        (-1.0, -1.0),
        ((0, 2),),
        "stop",
        text + "<call>",
        (call,),
        (seen,),
        None,
        2.0,
        0.5,
    )


def test_behaviour_counts():
    turns = (
        tool_turn("edit_file", "old_missing", path="a.py"),
        tool_turn("write_file", text="So be it. ", path="a.py"),
        tool_turn("shell", "nonzero_exit", command="python -m pytest -q"),
        tool_turn("shell", command="ls"),
        tool_turn("finish"),
    )
    rollout = Rollout("r", "t", "t", 0, 0, turns, Patch({"a.py": "x", "b.py": "y"}), "finished", 20.0)
    judged = Verdict("r", "t", "graded", 1.0, True, {}, seconds=3.0)
    flags = [Flag("r", "reads_tests", 2, "cat", 0.9)]
    found = behaviour.of(rollout, judged, flags=flags, reference={"a.py", "c.py"})
    assert found.calls == {"edit_file": 1, "write_file": 1, "shell": 2, "finish": 1}
    assert found.call_errors == {"edit_file": 1, "shell": 1} and found.num_call_errors == 2
    assert found.error_kinds == {"old_missing": 1, "nonzero_exit": 1}
    assert found.edit_fallbacks == 1 and found.test_runs == 1 and found.message_chars == len("So be it. ")
    assert (found.files_touched, found.files_expected, found.files_shared) == (2, 2, 1)
    assert (found.sampled_tokens, found.context_tokens) == (10, 20)
    assert found.reread_tokens == 6 + 12 + 18 + 24  # each prompt but its last 4 tokens
    assert found.seconds == {"sampling": 10.0, "tools": 2.5, "waiting": 7.5, "grading": 3.0}
    assert found.flags == {"reads_tests": 1} and behaviour.of(rollout).flags is None


def test_summary_of_behaviour_and_both_conventions():
    pairs = [attempt(n, n < 2, void=n == 4) for n in range(5)]
    graded = measures.pair(
        [r for r, _ in pairs], [v for _, v in pairs], flags=[Flag(pairs[0][0].id, "x", 0, "", 1.0)]
    )
    summary = measures.summary(graded)
    assert summary.estimates["flagged"].part == 1 and summary.estimates["flagged"].whole == 4
    assert (summary.estimates["solved"].whole, summary.strict["solved"].whole) == (4, 5)
    assert summary.strict["solved"].part == 2
    assert summary.passes["pass@1"].value == summary.passes["pass^1"].value == 0.5
    unseen = measures.summary(measures.pair([r for r, _ in pairs], [v for _, v in pairs]))
    assert unseen.estimates["flagged"].value is None, "no monitor looked"


def test_effort_against_difficulty():
    """Tasks that are solved half of the time cost 10 tokens, the others 30: perfectly calibrated."""
    spent = [
        effort.Spent(str(n), solved, tokens=10 if n % 2 == 0 else 30, turns=1)
        for n in range(12)
        for solved in (False, n % 2 == 0)
    ]
    difficulty = effort.difficulties(spent)
    assert difficulty["0"] == 0.5 and difficulty["1"] == 1.0
    buckets = effort.by_difficulty(spent, difficulty)
    assert [(b.low, b.num_tasks, b.tokens.value) for b in buckets] == [(0.5, 6, 10.0), (0.75, 6, 30.0)]
    assert effort.calibration(spent, difficulty) == pytest.approx(1.0)
    assert effort.calibration(spent[:2], difficulty) is None
