"""Children of a solved task: every operator gives proven ones, or says why not."""

from __future__ import annotations

from pathlib import Path

import counting_provider
import pytest
from conftest import WORDS
from counting_provider import nobody_else

from woodshed import grading, synthesis, tasks
from woodshed.records import Patch, Task, TaskError
from woodshed.synthesis import harden, stubs
from woodshed.synthesis.task_variants import Parent, merge

FAILED = WORDS[: WORDS.index("    found = {}")] + "    return {}\n"


@pytest.fixture(scope="module")
def made(tiny_task: Task, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    """Operator to child, of a task that is one stub in a package of four functions."""
    out = tmp_path_factory.mktemp("children")
    attempts = harden.AttemptOutcomes(failures={tiny_task.name: {"tally/words.py": FAILED}})
    with nobody_else() as opened:
        sandboxes = counting_provider.SETTINGS.create()
        report = harden.harden([tiny_task], out, attempts=attempts, sandboxes=sandboxes)
    assert opened["agent"] > len(report.accepted) and opened["grader"] > 2 * len(report.accepted)
    return {task.provenance["hardened_by"]: task for task in report.accepted}


def test_most_operators_have_a_child_even_in_so_small_a_package(made: dict[str, Task]):
    assert set(made) >= {"H2", "H3", "H5", "H6", "H7", "H8", "H9", "H10", "H11"}


def test_every_child_is_proven_from_its_folder_alone(made: dict[str, Task], tiny_task: Task):
    """Making has checked each of them, and its id is the digest of what it checked."""
    for number, (operator, child) in enumerate(made.items()):
        found = tasks.load(child.folder)
        assert found == child and child.id not in ("", tiny_task.id), operator
        assert child.provenance["parent"] == tiny_task.id
        assert number % 3 or synthesis.check(found) == [], operator


def test_children_know_their_tests_of_behaviour(made: dict[str, Task]):
    assert made["H3"].stub_passes.keys() == set(stubs.KINDS)  # the whole function is gone
    assert all(child.behaviour_tests for child in made.values())
    assert [name for name, child in made.items() if not child.stub_passes] == ["H11"]  # nothing is gone


def test_what_solved_the_parent_does_not_solve_a_wider_child(made: dict[str, Task], tiny_task: Task):
    for operator in ("H5", "H10"):  # H2 stays in the file, and a patch holds whole files
        assert not grading.grade(made[operator], tasks.gold_patch(tiny_task)).solved, operator


def test_a_renamed_child_is_not_solved_by_the_published_code(made: dict[str, Task], tiny_task: Task):
    child = made["H8"]
    assert child.target_symbol != "count" and child.target_symbol in child.instruction
    assert not grading.grade(child, tasks.gold_patch(tiny_task)).solved


def test_an_import_that_is_new_fails_the_constrained_child(made: dict[str, Task]):
    gold = tasks.gold_patch(made["H6"]).files["tally/words.py"] or ""
    for module, reward in (("collections", 0.0), ("", 1.0)):
        text = f"import {module}\n{gold}" if module else gold
        assert grading.grade(made["H6"], Patch({"tally/words.py": text})).reward == reward


def test_a_table_of_the_known_answers_fails_the_strengthened_child(made: dict[str, Task], tiny_task: Task):
    known = {"a b a": {"a": 2, "b": 1}, "Grüße, grüße!": {"grüße": 2}, "": {}}
    known["The sea, the sea, the boat."] = {"the": 3, "sea": 2, "boat": 1}
    workspace = tiny_task.folder / "environment/workspace/tally/words.py"
    lookup = f"return dict({known!r}.get(text, {{}}))"
    text = workspace.read_text().replace('raise NotImplementedError("count")', lookup)
    child = made["H7"]
    verdict = grading.grade(child, Patch({"tally/words.py": text}))
    more = [test for test in child.fail_to_pass if "test_more" in test]
    assert len(more) >= 2 and any(verdict.outcomes[test] != "passed" for test in more)


def test_a_failed_start_is_shown(made: dict[str, Task]):
    start = made["H11"].folder / "environment/workspace/tally/words.py"
    assert start.read_text() == FAILED


def test_what_is_there_is_kept_and_a_second_run_gives_the_same(
    made: dict[str, Task], tiny_task: Task, tmp_path: Path
):
    again = harden.harden([tiny_task], tmp_path, operators=["H6", "H9"])
    assert [t.id for t in again.accepted] == [made["H6"].id, made["H9"].id]
    third = harden.harden([tiny_task], tmp_path, operators=["H6", "H9"])
    assert [t.id for t in third.accepted] == [t.id for t in again.accepted] and not third.tried


def test_a_child_that_would_hardly_be_harder_is_not_made(tiny_task: Task, tmp_path: Path):
    rarely = harden.AttemptOutcomes(rates={tiny_task.name: 0.05})
    report = harden.harden([tiny_task], tmp_path, operators=["H12"], attempts=rarely)
    assert report.accepted == [] and "hardly harder" in next(iter(report.rejected))
    with pytest.raises(TaskError, match="H99"):
        harden.harden([tiny_task], tmp_path, operators=["H99"])


def test_two_gaps_are_combined(tiny_task: Task, made: dict[str, Task], tmp_path: Path):
    """The second gap is that of a child: `top` in another file."""
    other = made["H5"]
    report = harden.harden([tiny_task, other], tmp_path, operators=["H1"])
    for child in report.accepted:
        assert synthesis.check(child) == []


def test_merge_keeps_both_changes_or_refuses():
    base = "a\nb\nc\nd\n"
    assert merge(base, "a\nB\nc\nd\n", "a\nb\nc\nD\n") == "a\nB\nc\nD\n"
    assert merge(base, "a\nc\nd\n", "a\nb\nc\n") == "a\nc\n"
    assert merge(base, base, "a\n") == "a\n"
    assert merge(base, "a\nX\nc\nd\n", "a\nY\nc\nd\n") is None


def test_the_original_repository_is_found_again(tiny_task: Task, tiny_repository: Path):
    parent = Parent.open(tiny_task)
    for path, text in parent.before.items():
        assert text == (tiny_repository / path).read_text(encoding="utf-8")
