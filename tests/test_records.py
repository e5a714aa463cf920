"""Records and their JSON form, which run folders of today and tomorrow hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from woodshed import records
from woodshed.records import (
    Call,
    Environment,
    Group,
    Hint,
    Observation,
    Patch,
    Rollout,
    Task,
    Turn,
    Verdict,
    from_json,
    to_json,
)

CALL = Call(
    "1", "edit_file", {"path": "a.py", "lines": [1, 2], "deep": {"x": None}}, "<call>…", "old_missing"
)
TURN = Turn(
    context_ids=(1, 2, 3),
    opening=2,
    sampled_ids=(4, 5),
    logps=(-0.25, -1.5e-05),
    versions=((3, 1), (4, 1)),
    finish_reason="stop",
    text="text\n\x00\ud800",
    calls=(CALL,),
    observations=(Observation("1", "seen", "old_missing", 0.5),),
    error_kind="old_missing",
)
ROLLOUT = Rollout(
    "eval-0-a-0", "abc", "a", 0, 7, (TURN, TURN), Patch({"a.py": None, "b.py": "x"}), "finished", 1.5
)
TASK = Task(
    id="abc",
    name="a",
    folder=Path("tasks/a"),
    instruction="Do it.",
    environment=Environment("3.11", ("pytest==9.2.0",), ("toolz",)),
    allowed_paths=("toolz",),
    fail_to_pass=("tests/test_a.py::test[1]",),
    pass_to_pass=(),
    operator="stub",
    level=1,
    target_path="toolz/a.py",
    target_symbol="f",
    target_lines=(3, 4),
    test_command="python -m pytest",
    provenance={"source": "pypi:toolz==1.2.0", "nested": {"seed": 0}},
)
EXAMPLES = [
    CALL,
    TURN,
    ROLLOUT,
    TASK,
    Group("abc", (ROLLOUT,)),
    Hint("eval-0-a-0", 1, "unknown_tool", "Reminder: ..."),
    Verdict("eval-0-a-0", "abc", "graded", 0.5, False, {"t": "failed"}, ("sentinel passed",)),
]


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_round_trip(record: Any):
    assert from_json(type(record), json.loads(json.dumps(to_json(record)))) == record


def test_a_field_that_is_unknown():
    with pytest.raises(ValueError, match="Hint has no field 'colour'"):
        from_json(Hint, {**to_json(EXAMPLES[5]), "colour": "red"})
    with pytest.raises(ValueError, match="Call has no field 'colour'"):
        data = to_json(ROLLOUT)
        data["turns"][1]["calls"][0]["colour"] = "red"
        from_json(Rollout, data)


def test_an_older_record_takes_the_defaults_of_newer_fields():
    data = to_json(TURN)
    for newer in ("sample_s", "tools_s", "oracle"):
        del data[newer]
    assert from_json(Turn, data) == TURN


def test_an_older_record_that_lacks_what_is_needed():
    data = to_json(TURN)
    del data["logps"]
    with pytest.raises(ValueError, match=r"Turn: .*logps"):
        from_json(Turn, data)


def test_a_pair_that_is_not_a_pair():
    with pytest.raises(ValueError):
        from_json(Task, {**to_json(TASK), "target_lines": [1, 2, 3]})


def test_records_are_frozen_and_described():
    for record in EXAMPLES:
        name = dataclasses.fields(record)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, None)
    assert all(
        getattr(records, name).__doc__ for name in ("Task", "Turn", "Rollout", "Group", "Verdict", "Hint")
    )


def test_token_ids_are_the_whole_sequence():
    assert ROLLOUT.segments[0].token_ids == (1, 2, 3, 4, 5, 1, 2, 3, 4, 5)
    assert ROLLOUT.counters == {
        "turns": 2,
        "calls": 2,
        "faulty_turns": 2,
        "sampled_tokens": 4,
        "context_tokens": 6,
    }


def test_a_failed_command_is_news_and_not_a_fault():
    assert "nonzero_exit" not in records.CALL_FAULTS and "timeout" not in records.CALL_FAULTS
