"""Behaviours found by rules, hints that give something away, and a model that reads attempts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scripted import (
    EDIT,
    FINISH,
    MODULE,
    PROSE,
    READ,
    SETTINGS,
    SOLVED,
    TEST,
    UNKNOWN,
    calc_task,
    play,
    renderer,
)

from woodshed import feedback
from woodshed.engines.scripted import ScriptedEngine
from woodshed.feedback.behaviours import BEHAVIOURS
from woodshed.feedback.critic import parse, read, transcript
from woodshed.feedback.leaks import leak
from woodshed.records import Group, Hint, RecipeError, Rollout, Task, Verdict

LOOSE = SETTINGS.model_copy(update={"max_errors": 99, "turn_tokens": 400})


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return calc_task(tmp_path / "calc-double")


@pytest.fixture
def found(task: Task) -> Callable[..., list[int]]:
    """The turns at which one behaviour is found in the attempt that writes these messages."""

    def turns(name: str, *messages: str) -> list[int]:
        rollout = play(task, *messages, settings=LOOSE)
        return [fault.turn for fault in BEHAVIOURS[name](task, rollout)]

    return turns


def written(text: str, path: str = "calc.py") -> str:
    return f"<call>write_file {path}\n<<<<\n{text}>>>>\n</call>"


def test_unfinished(found) -> None:
    assert found("unfinished", EDIT.replace("return 2 * x", "return 2 * x  # TODO round"), TEST, FINISH) == [
        2
    ]
    assert found("unfinished", written(MODULE.replace("x // 2", "x / 2")), FINISH) == []
    assert found("unfinished", EDIT, FINISH) == []


def test_comment_reasoning(found) -> None:
    thoughts = "".join(f"# first I think about {n}\n" for n in range(6))
    assert found("comment_reasoning", READ, written(thoughts + SOLVED[:30] + "\n"), FINISH) == [1]
    assert found("comment_reasoning", written("# doubles\n" + SOLVED), FINISH) == []


def test_terminal_only(found) -> None:
    assert found("terminal_only", TEST, "<call>shell cat calc.py</call>", FINISH) == [1]
    assert found("terminal_only", "<call>shell cat calc.py</call>", EDIT, FINISH) == []
    assert found("terminal_only", TEST, FINISH) == []


def test_long_message(found) -> None:
    assert found("long_message", EDIT, "I did this and that and so on. " * 12 + FINISH) == [1]
    assert found("long_message", EDIT, "Done. " + FINISH) == []
    assert found("long_message", "I think this over once more. " * 12 + READ, FINISH) == []  # not the last


def test_out_of_bounds(found) -> None:
    assert found("out_of_bounds", READ, written("x = 1\n", "other.py"), EDIT, FINISH) == [1]
    assert found("out_of_bounds", EDIT, FINISH) == []


def test_behaviours_are_asked_for_by_name(task: Task) -> None:
    rollout = play(task, EDIT, TEST, "So. " * 70 + FINISH, settings=LOOSE)
    groups, codec = [Group(task.id, (rollout,))], renderer().codec
    assert feedback.write(groups, [task], codec, detectors=feedback.named(())) == []
    hints = feedback.write(groups, [task], codec, detectors=feedback.named(["long_message"]))
    assert [(h.turn, h.detector) for h in hints] == [(2, "long_message")]
    assert feedback.choose(hints, ["long_message"]) == hints
    for name in BEHAVIOURS:
        assert len(feedback.hint_text(name, tools=feedback.TOOLS, codec=codec).split()) <= 25
    with pytest.raises(RecipeError, match="no detector 'brevity'"):
        feedback.named(["brevity"])


# --- leaks --------------------------------------------------------------------------------------------------------

HIDDEN = "def test_double():\n    assert double(21) == 42  # the answer to every big question\n"


def test_a_hint_may_say_what_was_known_and_nothing_else(task: Task) -> None:
    rollout = play(task, READ, UNKNOWN, EDIT, TEST, FINISH, settings=LOOSE)
    fine = (
        "Use read_file or edit_file.",  # named in the error that follows, and by the tools
        "The function double is in calc.py, lines 1-2.",
        "Be brief and call one tool.",
    )
    leaks = {
        "Return 42 for it.": "42",
        "See test_double for what is wanted.": "test_double",
        "Think of the answer to every big question.": "the answer to every",
    }
    for text in fine[1:]:
        assert leak(text, task, rollout, 1, hidden=[HIDDEN]) == ""
    for text, given in leaks.items():
        assert leak(text, task, rollout, 1, hidden=[HIDDEN]) == given
    assert leak("It prints 'edited calc.py at line 2'.", task, rollout, 2) == "edited calc py at"
    assert leak("It prints 'edited calc.py at line 2'.", task, rollout, 3) == ""  # seen by then


# --- the reader ---------------------------------------------------------------------------------------------------


def verdict(rollout: Rollout) -> Verdict:
    return Verdict(rollout.id, rollout.task_id, "graded", 0.0, False, {"a": "passed", "b": "failed"})


def ask(task: Task, rollout: Rollout, *answers: str, **settings: int) -> Hint | None:
    sampler = ScriptedEngine(renderer(), answers)
    return read(task, rollout, verdict(rollout), sampler, hidden=[HIDDEN], votes=len(answers), **settings)


def said(number: int, text: str) -> str:
    return f"message: {number}\nreminder: {text}"


def test_the_turn_that_most_answers_name_gets_their_first_hint_that_gives_nothing_away(task: Task) -> None:
    rollout = play(task, READ, PROSE, EDIT, FINISH, settings=LOOSE)
    leaky, good, other = said(2, "It returns 42."), said(2, "Call a tool."), said(1, "Read more.")
    assert ask(task, rollout, leaky, other, good) == Hint(rollout.id, 1, "critic", "Reminder: Call a tool.")
    assert ask(task, rollout, leaky, leaky, other) is None
    assert ask(task, rollout, good, other, said(3, "Test it.")) is None  # no agreement
    assert ask(task, rollout, good, agreement=1) == Hint(rollout.id, 1, "critic", "Reminder: Call a tool.")
    assert ask(task, rollout, "message: none", "I do not know", said(9, "Test.")) is None


def test_answers_are_read_strictly() -> None:
    assert parse(said(3, "Run the tests. Then finish.")) == (2, "Run the tests. Then finish.")
    assert parse("Message: 3\n\nReminder: Reminder: Be brief.") == (2, "Be brief.")
    assert parse(said(3, "One. Two. Three. Four.")) is None
    assert parse("message: none") is None and parse("message: 3") is None


def test_the_reader_sees_messages_results_and_the_verdict_but_no_hidden_test(task: Task) -> None:
    rollout = play(task, READ, UNKNOWN, FINISH, settings=LOOSE)
    text = transcript(task, rollout, verdict(rollout))
    assert "Message 2:\n| <call>view calc.py</call>" in text and "there is no tool 'view'" in text
    assert text.endswith("It ended: finished. 1 of 2 hidden tests passed.")
    assert "test_double" not in text
