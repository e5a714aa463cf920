"""Tasks made from other tasks, from a git history, or from code that stays; sets in figures and as lines of JSON."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from woodshed import synthesis
from woodshed.grading import GradingSettings, grade
from woodshed.pysource.edits import apply, parse
from woodshed.records import Patch, Task, TaskError
from woodshed.synthesis import history, impossible, measuring, sources, stats
from woodshed.synthesis.progress import Phases
from woodshed.synthesis.repository_context import Rejected, Visibility
from woodshed.tasks import export, folder

WORDS = '''
def longest(words, default=None):
    """The longest word."""
    best = default
    for word in words:
        if best is None or len(word) > len(best):
            best = word
    return best
'''
TESTS = """
from words import longest


def test_longest():
    assert longest(["a", "bcd", "ef"]) == "bcd"


def test_first_of_equals():
    assert longest(["ab", "cd"]) == "ab"


def test_nothing():
    assert longest([], "x") == "x"
"""
MORE = '''

def shortest(words):
    """The shortest word."""
    return min(words, key=len)
'''


def lay(root: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.lstrip("\n").encode())
    return root


def git(repository: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", *who, "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_equalities_are_contradicted_on_the_next_line():
    body = "        self.assertEqual(f(1), 2)\n        assert g(\n            1) == 3\n"
    source = parse("class T:\n    def test_a(self):\n" + body)
    assert source is not None
    first, second = impossible._contradictions(source, ["T", "test_a"])
    text = apply(source.text, [first, second])
    assert "        self.assertNotEqual(f(1), 2)\n" in text and text.endswith(
        "        assert (g(\n            1)) != (3)\n"
    )
    assert list(impossible._contradictions(source, ["T", "test_b"])) == []


def test_a_twin_cannot_be_solved_by_the_original(tiny_task: Task, tmp_path: Path):
    twin = impossible.contradict(tiny_task, tmp_path / "twin")
    assert (
        twin.provenance["impossible"] == [tiny_task.fail_to_pass[0]]
        and twin.provenance["parent"] == tiny_task.id
    )
    assert synthesis.check(folder.load(twin.folder)) == []
    assert not grade(twin, folder.gold_patch(twin)).solved
    with pytest.raises(Rejected, match="no_assertion"):
        none = [t for t in tiny_task.fail_to_pass if "test_count[zzz" in t]
        impossible.contradict(Task(**{**vars(tiny_task), "fail_to_pass": tuple(none)}), tmp_path / "none")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository: one commit without tests, one that adds a function and its test, one that mends a bug."""
    root = tmp_path_factory.mktemp("git") / "words"
    wrong = WORDS.replace("len(word) > len(best)", "len(word) >= len(best)")
    lay(root, {"words.py": wrong, "test_words.py": TESTS[: TESTS.index("def test_first")]})
    git(root, "init", "-q")
    for message, files in {
        "start": {},
        "Keep the first of equals\n\nNot the last one.": {"words.py": WORDS, "test_words.py": TESTS},
        "only docs": {"README": "x"},
    }.items():
        lay(root, files)
        git(root, "add", "--all")
        git(root, "commit", "-qm", message)
    return root


def test_commits_that_change_code_and_tests(words: Path):
    found = list(history.commits(words, "HEAD", 10))
    assert [commit.subject for commit in found] == ["Keep the first of equals", "start"]
    assert found[0].body == "Not the last one." and found[1].before == {"words.py": None}
    assert ">= len(best)" in (found[0].before["words.py"] or "")
    with pytest.raises(TaskError, match=r"git log in .* failed"):
        list(history.commits(words, "nowhere", 10))


def test_a_commit_is_reversed_and_tests_are_asked_for(words: Path, tmp_path: Path):
    settings = synthesis.SynthesisSettings(
        limit=1, operators=("revert", "write_tests"), timeout_s=300, max_lost=0.9
    )
    made = synthesis.make([f"git+file://{words}"], tmp_path / "out", settings)
    tasks = {task.operator: task for task in made.accepted}
    reverted, written = tasks["revert"], tasks["write_tests"]
    assert reverted.instruction.startswith("Keep the first of equals\n\n")
    assert "Not the last one." in reverted.instruction
    assert reverted.fail_to_pass == ("test_words.py::test_first_of_equals",)
    assert reverted.provenance["source"] == f"git+file://{words}@{git(words, 'rev-parse', 'HEAD^')}"
    assert not list(reverted.folder.rglob(".git"))
    assert written.allowed_paths == ("checks",) and written.target_path == "checks/check_longest.py"
    assert not (written.folder / "environment/workspace/test_words.py").exists()
    assert [reason for task in tasks.values() for reason in synthesis.check(task)] == []
    lazy = Patch(files={written.target_path: "def test_nothing():\n    pass\n"})
    verdict = grade(written, lazy, settings=GradingSettings(shaped=True))
    accepted = {test for test, outcome in verdict.outcomes.items() if outcome == "passed"}
    assert (
        accepted == {test for test in written.fail_to_pass if "test_accepts" in test} and not verdict.solved
    )
    hostile = Patch(files={written.target_path: "def test_everything():\n    raise AssertionError\n"})
    assert verdict.reward == grade(written, hostile, settings=GradingSettings(shaped=True)).reward == 0
    # the first of equals: what was there before passes one test, so no stub is better than it
    assert reverted.behaviour_tests == reverted.fail_to_pass


def test_tests_that_are_printed_elsewhere_are_not_asked_for(tmp_path: Path):
    """The gate is for tasks of every kind: here the answer would be the original tests."""
    root = lay(tmp_path / "words", {"words.py": WORDS, "test_words.py": TESTS, "docs/tour.md": TESTS})
    settings = synthesis.SynthesisSettings(limit=1, operators=("write_tests",), timeout_s=300)
    report = synthesis.make([str(root)], tmp_path / "out", settings)
    assert report.accepted == [] and report.rejected == {"leak": 1}
    assert "/workspace/docs/tour.md" in (tmp_path / "out" / "rejections.jsonl").read_text()
    assert not list((tmp_path / "out").glob("words-*"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of one function, and beside it what is measured of it before tasks are made."""
    root = tmp_path_factory.mktemp("measured")
    source = lay(root / "words", {"words.py": WORDS, "test_words.py": TESTS})
    repository = sources.fetch(str(source), root / "tree")
    phases = Phases(lambda done, total, text: None)
    measuring.measured_once(repository, root, synthesis.SynthesisSettings(timeout_s=300), phases)
    return root


@pytest.mark.parametrize("mode", ["shown", "half", "none"])
def test_what_the_agent_sees(mode: Visibility, measured: Path, tmp_path: Path):
    shutil.copytree(measured / ".baselines", tmp_path / "out" / ".baselines")
    settings = synthesis.SynthesisSettings(
        limit=1, operators=("stub",), timeout_s=300, max_lost=1.0, visibility=mode, length="terse"
    )
    (task,) = synthesis.make([str(measured / "words")], tmp_path / "out", settings).accepted
    assert len(task.fail_to_pass) == 3 and synthesis.check(task) == []
    assert (
        task.instruction
        == "`longest(words, default)` in words isn't implemented, it just raises. Can you write it?\n"
    )
    shown = task.folder / "environment/workspace/test_words.py"
    tests = shown.read_text().count("def test_") if shown.exists() else 0
    assert tests == {"shown": 3, "half": 2, "none": 0}[mode]
    assert (task.folder / "tests/files/test_words.py").read_text() == TESTS.lstrip("\n")


# ---- sets -------------------------------------------------------------------------------------------------


def test_a_set_in_figures(tiny_task: Task, tmp_path: Path):
    log = tmp_path / "rejections.jsonl"
    lines = [
        {"task": name, "reason": why}
        for name, why in (("a", "too_wide"), ("b", "timeout"), ("c", "too_wide"))
    ]
    lines.append({"task": "b", "reason": "cascade"})  # tried again
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = stats.summarise([tiny_task], log)
    assert found.rejected == {"too_wide": 2, "cascade": 1} and found.acceptance == 0.25
    rows = {(row.group, row.name): row for row in found.rows}
    assert set(rows) == {("repository", "tally"), ("operator", "stub"), ("level", "1")}
    assert rows["level", "1"].fail_to_pass == 4 and rows["level", "1"].pass_to_pass == 2
    assert stats.table(found)[2][:4] == ["operator", "stub", "1", "100%"]
    picture = stats.picture([tiny_task])
    assert picture.startswith("<svg") and "stub, level 1: 1" in picture


@pytest.mark.parametrize("kind", ["swebench", "swesmith"])
def test_exported_patches_apply(kind: export.Format, tiny_task: Task, tmp_path: Path):
    assert export.export([tiny_task], kind, tmp_path / "out.jsonl") == 1
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    instance = json.loads(line)
    repository = tmp_path / "repository"
    subprocess.run(["cp", "-r", str(tiny_task.folder / "environment/workspace"), str(repository)], check=True)
    git(repository, "init", "-q")
    gold = instance["patch" if kind == "swebench" else "gold_patch"]
    for patch in (gold, instance["test_patch"]):
        subprocess.run(["git", "apply", "-"], cwd=repository, input=patch, text=True, check=True)
    for path, text in folder.gold_patch(tiny_task).files.items():
        assert (repository / path).read_text() == text
    for path, data in folder.protected_files(tiny_task).items():
        assert (repository / path).read_bytes() == data
    failing = instance["FAIL_TO_PASS"]
    assert (json.loads(failing) if kind == "swebench" else failing) == list(tiny_task.fail_to_pass)
    if kind == "swesmith":  # the bug patch leads back
        subprocess.run(["git", "apply", "-"], cwd=repository, input=instance["patch"], text=True, check=True)
        broken = (tiny_task.folder / "environment/workspace" / tiny_task.target_path).read_text()
        assert (repository / tiny_task.target_path).read_text() == broken
    assert export.instance(tiny_task, kind) == instance  # the commit is the same every time
