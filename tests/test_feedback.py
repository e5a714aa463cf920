"""Every detector on rollouts that really happened, and what its hint may say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scripted import EDIT, FINISH, PROSE, READ, SETTINGS, TEST, UNKNOWN, UNREADABLE, calc_task, play, renderer

from woodshed import feedback
from woodshed.agent.tools import TOOLS, form
from woodshed.records import CALL_FAULTS, Group, Hint, RecipeError, Rollout, Task
from woodshed.tokens.codec import CODECS

BROKEN = EDIT.replace("return 2 * x", "return (2 * x")
ABSENT = EDIT.replace("raise NotImpl", "raise   NotImpl")
AMBIGUOUS = EDIT.replace("    raise NotImplementedError\n=", "(x):\n=")
LOOSE = SETTINGS.model_copy(update={"max_errors": 99})


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return calc_task(tmp_path / "calc-double")


@pytest.fixture
def hints(task: Task) -> Callable[..., list[Hint]]:
    """The hints on the attempt that writes these messages, then finishes."""

    def written(*messages: str, codec: str = "plain") -> list[Hint]:
        rollout = play(task, *messages, settings=LOOSE, codec=codec)
        return feedback.write([Group(task.id, (rollout,))], [task], renderer(codec).codec)

    return written


def found(hints: list[Hint]) -> list[tuple[int, str]]:
    return [(hint.turn, hint.detector) for hint in hints]


@pytest.mark.parametrize(
    ("detector", "message"),
    [
        ("unknown_tool", UNKNOWN),
        ("unparseable", UNREADABLE),
        ("bad_arguments", "<call>read_file</call>"),
        ("bad_path", "<call>read_file nowhere.py</call>"),
        ("old_missing", ABSENT),
        ("old_ambiguous", AMBIGUOUS),
        ("no_call", PROSE),
        ("truncated", "I think that " * 100),
        ("too_many_calls", READ + READ),
    ],
)
def test_each_call_fault_gets_its_hint_at_its_turn(hints, detector: str, message: str) -> None:
    assert found(hints(READ, message, EDIT, TEST, FINISH)) == [(1, detector)]


def test_a_good_attempt_gets_none_and_a_failed_test_is_no_fault(hints) -> None:
    assert hints(READ, EDIT, TEST, FINISH) == []
    assert hints(TEST, READ, EDIT, TEST, FINISH) == []


def test_repeated(hints) -> None:
    assert found(hints(UNKNOWN, UNKNOWN, ABSENT, READ, ABSENT, TEST, FINISH)) == [
        (0, "unknown_tool"),
        (1, "repeated"),
        (2, "old_missing"),
        (4, "repeated"),
    ]
    assert found(hints(TEST, READ, TEST, EDIT, TEST, FINISH)) == [(2, "repeated")]  # nothing had changed
    assert found(hints(UNREADABLE, UNREADABLE + "\n", TEST)) == [(0, "unparseable"), (1, "repeated")]


def test_untested(hints) -> None:
    assert found(hints(FINISH)) == [(0, "untested")]
    assert found(hints(READ, EDIT, FINISH)) == [(2, "untested")]
    assert found(hints(READ, TEST, EDIT, FINISH)) == [(3, "untested")]  # not since the change
    assert found(hints(EDIT, TEST, ABSENT, FINISH)) == [(2, "old_missing")]  # a failed edit changes nothing
    assert found(hints(*[READ] * 12)) == []  # it never finished


def test_finishing_on_a_syntax_error(hints) -> None:
    assert found(hints(EDIT, "<call>shell echo 'x = (' > new.py</call>", FINISH)) == [(2, "syntax_error")]
    assert found(hints(BROKEN, TEST, FINISH)) == [(2, "syntax_error")]
    assert found(hints(BROKEN, FINISH)) == [(1, "syntax_error")]  # one hint a turn
    assert found(hints("<call>shell echo 'x = (' > notes.txt; rm calc.py</call>")) == []
    assert found(hints("<call>shell printf 'x = 1\\0' > new.py</call>")) == [(1, "syntax_error")]


def test_a_lost_sandbox_teaches_nothing(task: Task) -> None:
    rollout = play(task, UNKNOWN)
    lost = Rollout(**{**vars(rollout), "ended": "sandbox_lost"})
    assert feedback.write([Group(task.id, (lost,))], [task], CODECS["plain"]) == []


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("detector", feedback.DETECTORS)
def test_a_hint_is_short_and_is_written_without_a_rollout(detector: str, codec) -> None:
    for tool in (None, "edit_file", "nonsense"):
        text = feedback.hint_text(detector, tools=TOOLS, codec=codec, tool=tool)
        assert text.startswith("Reminder: ") and len(text.split()) <= 25
        assert text == feedback.hint_text(detector, tools=TOOLS, codec=codec, tool=tool)


def test_every_call_fault_has_a_detector() -> None:
    assert set(CALL_FAULTS) < set(feedback.DETECTORS)


@pytest.mark.parametrize("codec", ["plain", "json"])
def test_a_hint_shows_the_form_of_the_tool_that_was_meant(hints, codec: str) -> None:
    written = renderer(codec).codec
    bad = "<call>edit_file calc.py</call>" if codec == "plain" else '<call>{"name": "edit_file"}</call>'
    cut = form("edit_file", written).replace(">>>>", "").replace("}", "")
    for message, detector in ((bad, "bad_arguments"), (cut, "unparseable")):
        hint = hints(message, codec=codec)[0]
        assert hint.detector == detector and form("edit_file", written) in hint.text
    names = hints(written.format("finish", {}, TOOLS).replace("finish", "end"), codec=codec)[0]
    assert (
        names.text == "Reminder: the only tools are read_file, edit_file, write_file, search, shell, finish."
    )


def test_a_hint_quotes_nothing_that_was_observed(hints, task: Task) -> None:
    """A hint that names a line which an earlier edit had replaced made the next turn worse in a prototype."""
    for hint in hints(EDIT, EDIT, ABSENT, AMBIGUOUS, "<call>read_file calc2.py</call>", BROKEN, FINISH):
        for secret in ("raise", "NotImplementedError", "return", "double", "calc"):
            assert secret not in hint.text.replace(task.test_command, "")


def test_placebos_are_about_no_fault() -> None:
    assert len(set(feedback.PLACEBOS)) >= 5
    words = {"call", "tool", "test", "read", "edit", "file", "path", "finish", "text", "message", "argument"}
    for text in feedback.PLACEBOS:
        assert text.startswith("Reminder: ") and len(text.split()) <= 25
        assert not any(word in text.lower() for word in words), text


def test_choosing_detectors(hints) -> None:
    written = hints(UNKNOWN, ABSENT, FINISH)
    assert feedback.choose(written) == written
    assert found(feedback.choose(written, ["old_missing"])) == [(1, "old_missing")]
    with pytest.raises(RecipeError, match="no detector 'old_mising'; did you mean 'old_missing'"):
        feedback.named(["old_mising"])
