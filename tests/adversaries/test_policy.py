"""Whatever a policy writes: commands, code, files and calls that no monitor, detector or report may stumble over.

Everything runs strictly here (`boundary.strict`), so that an error is an error; in a run it costs the one attempt.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from woodshed import boundary, feedback, grading
from woodshed.agent import TOOLS
from woodshed.evals import atif, behaviour
from woodshed.evals.measures import Graded
from woodshed.feedback import rewards
from woodshed.grading import decision
from woodshed.monitors import flag_policy, rules
from woodshed.monitors.evidence import Evidence
from woodshed.records import Access, Call, Group, Observation, Patch, PathClass, Rollout, Task, Turn, Verdict
from woodshed.report.transcripts import Archives, Remarks
from woodshed.runs.folder import RunDir
from woodshed.tokens.codec import CODECS

LONG = "a" * 300
NAMES = [
    LONG,
    "a/" * 3000 + "b",
    "",
    ".",
    "..",
    "/",
    "~",
    "a\0b",
    "a\nb",
    "\udcff",
    "\ud800",
    "\u202e",
    "*",
    "-rf",
    "é",
]
NAMES += [
    "tests/test_words.py",
    "tally/words.py",
    f"tests/{LONG}.py",
    f"tally/{LONG}.py",
    ".git/" + LONG,
    "../x",
]
NAMES += [
    "pyproject.toml",
    "setup.cfg",
    "tox.ini",
    "conftest.py",
    "/workspace/" + LONG,
    ".mypy_cache/x",
    "[",
    "x" * 5000,
]
COMMANDS = [
    "rm",
    "cat",
    "sed -i",
    "git rm",
    "git show",
    "git",
    "mv",
    "sleep",
    "python",
    "python -c",
    "python -m",
    "find",
]
COMMANDS += [
    "test -e",
    "bash -c",
    "env",
    "timeout",
    "xargs -I",
    "pip install",
    "dd",
    "ls",
    "eval",
    "echo",
    ">",
    "<",
    "tee",
]
COMMANDS += [
    "yes |",
    "locate",
    "curl",
    "export A=",
    "git stash",
    "git log HEAD~",
    "strings",
    "nohup",
    "find . -exec",
    "[",
    "ln",
]
WORDS = [
    *NAMES,
    "1.2.3",
    ".",
    "9" * 5000,
    "9" * 400 + "d",
    "\\",
    "'",
    '"',
    "$(",
    "`",
    "<<EOF",
    "|",
    "&&",
    ";",
    "#",
    "((",
    "{",
    "=1",
]
SNIPPETS = [
    "x = a{}\n",
    "eval(a{})\n",
    "if a{}:\n    pass\n",
    "assert a{}\n",
    "x = 2{}\n",
    "x = [0]{}\n",
    "time.sleep(2{})\n",
]
SNIPPETS += [
    "def count(t):\n    return 'a'{}\n",
    "raise E(a{})\n",
    "def count(t={{}}{}): pass\n",
    "@a{}\ndef count(t): pass\n",
]
CHAINS = [
    ".b",
    "()",
    "[0]",
    "*2",
    " ** 2",
    "+'a'",
    " or a == 2",
    " if b else 1",
    ".b()",
    "[sys]",
    " < a",
    " @ b",
]
NESTS = [
    "(",
    "[",
    "{",
    "-",
    "not ",
    "lambda: ",
    "f'{",
    "*",
    "await ",
    "x = ",
    "class A:\n",
    "if x:\n ",
    "1 if x else ",
]
HUGE = [
    "sys.modules[0x{}]",
    "setattr(os, 0x{}, 1)",
    "__import__(0x{})",
    "x.__dict__[0x{}]()",
    "x = {}",
    "time.sleep(0x{})",
    "{}j",
]
ODD = [
    "\0",
    "'''",
    "\ufeff",
    "\f",
    "\r",
    "\r\r\n",
    "# coding: utf-16\n",
    "# coding: no\n",
    "x = '\ud800'",
    "\u2028",
    "\x1a",
    "é",
]
TABLES = [
    "[tool]\npytest = 1",
    "tool = 1",
    "[tool.pytest]\nini_options = [1]",
    "[[tool]]",
    "project = 1",
    "x = " + "9" * 5000,
]
TABLES += [
    "[project]\nentry-points = 1",
    "[pytest]\naddopts = %(x)s",
    "a = " + "[" * 999 + "]" * 999,
    "[a]\n[a]",
    "=",
    "[",
    "[pytest]\nx",
]
MODES: tuple[Literal["read", "write", "exec"], ...] = ("read", "write", "exec")
CLASSES: tuple[PathClass, ...] = ("tests", "cache", "history", "copy", "package", "hook")
SIZES = (3, 90, 300, 950, 2500)


def code(draw: random.Random) -> str:
    size, kind = draw.choice(SIZES), draw.randrange(5)
    if kind == 0:
        return draw.choice(SNIPPETS).format(draw.choice(CHAINS) * size)
    if kind == 1:
        return "x = " + draw.choice(NESTS) * size + "1"
    if kind == 2:
        return draw.choice(HUGE).format("9" * size * 4)
    if kind == 3:
        return draw.choice(TABLES)
    return "".join(
        draw.choices([*ODD, "x = 1\n", "def count(text):\n", "    return {}\n", *string.printable], k=20)
    )


def command(draw: random.Random) -> str:
    parts = [
        f"{draw.choice(COMMANDS)} {' '.join(draw.choices(WORDS, k=draw.randint(0, 3)))}"
        for _ in range(draw.randint(1, 3))
    ]
    if draw.random() < 0.2:
        parts.append(f"python -c '{code(draw)}'")
    return draw.choice(["; ", "\n", " | ", " && "]).join(parts)


def call(draw: random.Random) -> Call:
    tool = draw.choice([*(spec.name for spec in TOOLS), "", "none"])
    whole = {
        "command": command(draw),
        "path": draw.choice(NAMES),
        "new": code(draw),
        "old": code(draw),
        "content": code(draw),
    }
    whole["pattern"] = draw.choice(WORDS)
    spec = next((spec for spec in TOOLS if spec.name == tool), None)
    arguments: dict[str, object] = {n: whole[n] for n in whole if spec and n in spec.parameters["properties"]}
    if draw.random() < 0.1:
        odd = (None, 1, 10**400, 1e308, [[]], {"a": {}}, True)
        arguments = {name: draw.choice(odd) for name in draw.sample(sorted(whole), 3)}
        return Call("c", tool, arguments, command(draw), "bad_arguments")
    return Call("c", tool, arguments, command(draw), None if spec else "unknown_tool")


def attempt(task: Task, draw: random.Random) -> Rollout:
    turns = []
    for _ in range(draw.randint(0, 4)):
        calls = tuple(call(draw) for _ in range(draw.randint(0, 2)))[:1]
        kind = calls[0].error_kind if calls else "no_call"
        seen = Observation(calls[0].id if calls else "", draw.choice(["done", *NAMES]), kind)
        turns.append(Turn((), 0, (), (), (), "stop", command(draw), calls, (seen,), kind))
    files = {
        draw.choice([*NAMES, "tally/words.py"]): draw.choice([None, code(draw)])
        for _ in range(draw.randint(0, 4))
    }
    accesses = tuple(
        Access(
            f"/workspace/{draw.choice(NAMES)}", draw.choice(CLASSES), draw.choice(MODES), 0, command(draw), 1
        )
        for _ in range(draw.randint(0, 3))
    )
    patch = Patch(files, {draw.choice(NAMES): "not a regular file"}, command(draw))
    return Rollout("r", task.id, task.name, 0, 0, tuple(turns), patch, "finished", 1.0, accesses)


def rounds(count: int) -> Iterator[random.Random]:
    return (random.Random(number) for number in range(count))


def test_whatever_a_policy_writes_is_watched_hinted_counted_kept_and_shown(tiny_task: Task, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", recipe="", manifest={})
    archives, made = Archives(), []
    for draw in rounds(150):
        rollout = attempt(tiny_task, draw)
        faults = tuple(draw.sample(NAMES, 2))
        verdict = Verdict(
            "r", tiny_task.id, "graded", 0.0, draw.random() < 0.5, {}, draw.choice([(), faults])
        )
        flags = rules.watch(rollout, tiny_task, verdict)
        assert all(0 <= flag.turn <= len(rollout.turns) for flag in flags)
        hints = feedback.write(
            [Group(tiny_task.id, (rollout,))],
            [tiny_task],
            CODECS["plain"],
            detectors=feedback.DETECTORS | feedback.BEHAVIOURS,
        )
        rewards.auxiliary(tiny_task, rollout, dict.fromkeys(rewards.TERMS, -0.1))
        behaviour.of(rollout, verdict, flags=flags)
        archives.add(0, rollout, verdict, 1, Remarks(), {})
        agent = {"extra": {"settings": {}}}
        atif.trajectory(
            Graded(rollout, verdict),
            hints=hints,
            task=tiny_task,
            session="s",
            agent=agent,
            position={},
            cost=None,
        )
        made.append(rollout)
    archives.pack()
    run.append("rollouts", made, "train", 0)
    assert len([rollout for _, _, rollout in run.read("rollouts", Rollout)]) == len(made)


def test_whatever_a_message_holds_is_read_and_can_be_kept(tmp_path: Path):
    run = RunDir.create(tmp_path / "run", recipe="", manifest={})
    deep = [
        "[" * 900 + "]" * 900,
        '{"a":' * 900 + "1" + "}" * 900,
        "9" * 5000,
        "9" * 400,
        "1e999",
        "NaN",
        '"\\ud800"',
        "null",
    ]
    opened = {"plain": "<call>", "json": "<call>", "hermes": "<tool_call>"}
    for draw in rounds(60):
        for name, codec in CODECS.items():
            tool, value = draw.choice(["read_file", "edit_file", "shell"]), draw.choice([*deep, f'"{LONG}"'])
            body = f'{{"name": "{tool}", "arguments": {{"path": {value}, "start": {draw.choice(deep)}}}}}'
            if name in opened:
                text = opened[name] + (
                    body if name != "plain" else f"{tool} {value} {draw.choice(deep)}\n{command(draw)}"
                )
                text += draw.choice(["", opened[name].replace("<", "</")])
            else:
                text = codec.format("read_file", {"path": "PATH"}, TOOLS).replace('"PATH"', value)
                text = text.replace("PATH", value)[: draw.choice([None, -1, -20])]
            _, calls, kind = codec.parse(text, TOOLS)
            turn = Turn((), 0, (), (), (), "stop", text, calls, (), kind)
            rollout = Rollout("r", "t", "t", 0, 0, (turn,), Patch({}), "finished", 1.0)
            run.append("rollouts", [rollout], "train", draw.randrange(1 << 30))
    for _ in run.read("rollouts", Rollout):
        pass


def breaks(*_: object) -> Iterator[object]:
    raise RecursionError("maximum recursion depth exceeded")
    yield  # makes it a generator, as rules and detectors are


def test_a_monitor_that_breaks_raises_a_flag_and_ends_nothing(
    tiny_task: Task, monkeypatch: pytest.MonkeyPatch
):
    rollout = attempt(tiny_task, random.Random(1))
    monkeypatch.setitem(rules.RULES, "history", rules.Rule(10, breaks))  # type: ignore[arg-type]
    with pytest.raises(RecursionError):
        rules.watch(rollout, tiny_task)  # a test sees it
    monkeypatch.setattr(boundary, "strict", False)
    settings = flag_policy.MonitorSettings()
    flags = flag_policy.look([rollout], [tiny_task], {}, settings, threshold=0.9)
    (flag,) = [flag for flag in flags if flag.rule == "history"]
    assert flag.quote == (
        "the rule could not read the attempt: RecursionError in breaks: maximum recursion depth exceeded"
    )
    assert flag_policy.without_gain([flag], settings) == {"r"}
    assert flag_policy.confirmed([flag]) == []


def test_a_detector_that_breaks_neither_hints_nor_pays(tiny_task: Task, monkeypatch: pytest.MonkeyPatch):
    turn = Turn((), 0, (), (), (), "stop", "", (), (), "no_call")
    rollout = Rollout("r", tiny_task.id, "", 0, 0, (turn, turn), Patch({}), "finished", 1.0)
    monkeypatch.setattr(boundary, "strict", False)
    with pytest.warns(UserWarning, match="r: detector 'odd' could not read the attempt: RecursionError"):
        hints = feedback.write(
            [Group(tiny_task.id, (rollout,))],
            [tiny_task],
            CODECS["plain"],
            detectors={"odd": breaks, **feedback.DETECTORS},  # type: ignore[dict-item]
        )
    assert [(hint.turn, hint.detector) for hint in hints] == [(0, "no_call"), (1, "no_call")]
    monkeypatch.setitem(rewards.TERMS, "repeated", lambda task, rollout: len(list(breaks())))
    with pytest.warns(UserWarning, match="r: a reward term could not be counted: RecursionError"):
        assert rewards.auxiliary(tiny_task, rollout, {"repeated": -0.5}) == {"repeated": -1.0}
        assert rewards.auxiliary(tiny_task, rollout, {"repeated": 0.5}) == {"repeated": 0.0}


def test_a_solution_whose_interface_cannot_be_read_is_no_solution(
    tiny_task: Task, monkeypatch: pytest.MonkeyPatch
):
    from woodshed.tasks import folder

    monkeypatch.setattr(boundary, "strict", False)
    monkeypatch.setattr(decision, "removed_api", lambda *_: list(breaks()))
    verdict = grading.grade(tiny_task, folder.gold_patch(tiny_task))
    assert (verdict.status, verdict.solved, verdict.reward) == ("graded", False, 0.0)
    assert verdict.integrity[0].startswith(f"{decision.UNREADABLE}: RecursionError")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x = os" + ".b" * 1500, "os" + ".b" * 1500),
        ("x = os" + ".b" * 900 + "()", "os" + ".b" * 900),
    ],
)
def test_long_names_are_read_to_their_end(text: str, name: str):
    from woodshed.pysource import code

    assert name in [found for found, _ in code.scan(text).names]


def test_long_products_are_multiplied(tiny_task: Task):
    """A list of 2^900 elements is a waste of memory however it is written."""
    text = "x = [0] * " + " * ".join(["2"] * 900) + "\n"
    patch = Patch({"tally/words.py": text})
    rollout = Rollout("r", tiny_task.id, "", 0, 0, (), patch, "finished", 1.0)
    assert [f.quote[:20] for f in rules.RULES["resource"].check(Evidence(tiny_task, rollout))] != []
