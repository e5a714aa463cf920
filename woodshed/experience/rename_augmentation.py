"""Scripted attempts under made-up names, so that a small model learns to copy names from the task.

Module, test file, function, class and line numbers of an attempt are replaced consistently, and its transcript is
rendered anew: its tokens are those that it would have had, had the names been these.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from woodshed.agent.attempt import AgentSettings
from woodshed.agent.prompt import user_prompt
from woodshed.experience.scripted_expert import ExpertAttempt, ExpertSettings, read_from
from woodshed.records import Task, Turn
from woodshed.tasks import folder
from woodshed.tokens.conversation import Conversation
from woodshed.tokens.renderer import Renderer

WORDS = """
access archive arrays assets backend batch blocks buffers builders cache calendar canvas catalog channels
charts checks clients clock codecs colors columns config convert cursor dates decode diffs digest dispatch
encode engine events export fields files filters fonts format frames graph grid groups handlers hashing
headers history images index input items jobs keys labels layers layout ledger links loader locale locks logs
maps markup masks matrix merge messages metrics models names nodes numbers objects options output pages parser
paths patterns plugins points pools ports profile query queue ranges reader records regions registry render
report request resolve rules runner sample schema scope search series sessions shapes signals slices slots
sorting spans state storage streams strings styles tables tags tasks text theme tokens tools tracks trees
types units values vectors views weights widgets window words worker writer zones
""".split()
"""What made-up modules, folders and functions are called, half the time."""

SYLLABLES = """
ba bel bo cal chi cor da del do el fa fi fun gar glo hum in jas ka ki lar lo lu mar mi mo mun na nel ni no ol pa per
pi po quo ra rel ri ro sa sem si sor ta tel ti to tri tul u va vel vi vo wa wen xi ya zo
""".split()

ENDINGS = ("", "", "", "s", "utils", "tools", "kit", "lib", "lang", "ify", "er", "io", "2")
"""Invented words are spelled from these: names of real packages are seldom one token, and must be copied too."""


def renamed(
    attempt: ExpertAttempt,
    task: Task,
    renderer: Renderer,
    settings: ExpertSettings,
    *,
    agent: AgentSettings,
    seed: str,
) -> ExpertAttempt:
    """The same attempt about another place: made-up file, test file, function and line numbers, consistently.

    The transcript is rendered anew, so its tokens are what they would be had the names been these.
    """
    rollout = attempt.rollout
    say = renaming(task, settings, random.Random(f"{seed}/{rollout.id}/names"))
    conversation = Conversation(renderer, agent.rules, say(user_prompt(task)), agent.tools.specs)
    turns: list[Turn] = []
    for turn in rollout.turns:
        text = say(turn.text)
        ids = renderer.encode_message(text)
        observations = tuple(
            replace(observation, text=say(observation.text)) for observation in turn.observations
        )
        calls = tuple(
            replace(call, raw=say(call.raw), arguments=_each(say, call.arguments)) for call in turn.calls
        )
        changed = {
            "text": text,
            "calls": calls,
            "sampled_ids": ids,
            "logps": (0.0,) * len(ids),
            "versions": ((0, len(ids)),),
            "observations": observations,
            "experts": None,
        }
        context = {
            "context_ids": conversation.context.ids,
            "opening": conversation.context.opening,
            "segment": conversation.segment,
            "begins": conversation.begins,
        }
        turns.append(replace(turn, **context, **changed))
        conversation.add(ids, "stop", observations, calls)
    reminders = tuple(replace(hint, text=say(hint.text)) for hint in attempt.reminders)
    return ExpertAttempt(replace(rollout, turns=tuple(turns)), reminders)


def _each(say: Callable[[str], str], arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: say(value) if isinstance(value, str) else value for name, value in arguments.items()}


def renaming(task: Task, settings: ExpertSettings, rng: random.Random) -> Callable[[str], str]:
    """A function that puts the same made-up names and numbers into every text of an attempt."""
    target, tests = _made_up_paths(rng)
    replacements = {task.target_path: target}
    for test_file in (word for word in shlex.split(task.test_command) if word.endswith(".py")):
        replacements[test_file] = tests
    owner, _, short = task.target_symbol.rpartition(".")
    name = "_".join(_made_up_word(rng) for _ in range(rng.randint(1, 3)))
    made_up = "".join(_made_up_word(rng).title() for _ in range(rng.randint(1, 2))) if owner else ""
    symbol = f"{made_up}.{name}" if owner else name
    for form in ("`{}`", '("{}")', '(\\"{}\\")'):
        replacements[form.format(task.target_symbol)] = form.format(symbol)
    replacements[f"def {short}("] = f"def {name}("
    if owner:
        replacements[owner] = made_up
    first, gap = read_from(task, settings), task.target_lines[0]
    lines = len(folder.original(task, task.target_path).read_bytes().splitlines())
    if first > 60:  # smaller numbers are counts of other things too
        shift = rng.randint(61 - first, 1500)
        for number in (first, gap, min(first + settings.read_lines - 1, lines), lines):
            replacements[str(number)] = str(number + shift)
    wanted = "|".join(
        rf"(?<!\w){'(?<![.])' * old.isdigit()}{re.escape(old)}(?!\w)"
        if old.isdigit() or old == owner
        else re.escape(old)
        for old in sorted(replacements, key=len, reverse=True)
    )
    return lambda text: re.sub(wanted, lambda match: replacements[match[0]], text)


def _made_up_paths(rng: random.Random) -> tuple[str, str]:
    """(module, test file) laid out as repositories are: nested, flat, under src, or a package in one file."""
    package, module = _made_up_word(rng), _made_up_word(rng)
    inner = [_made_up_word(rng) for _ in range(rng.randint(0, 1))]
    root = rng.choice([[], [], [], ["src"]])
    stem, parts = rng.choice(
        [
            (module, [*root, package, *inner, f"{module}.py"]),
            (module, [*root, package, *inner, f"{module}.py"]),
            (package, [*root, package, f"{package}.py"]),
            (package, [*root, package, "__init__.py"]),
            (module, [f"{module}.py"]),
        ]
    )
    tested = rng.choice([stem, stem, package, _made_up_word(rng)])
    tests = rng.choice([["tests"], ["tests"], ["test"], [], [package, "tests"]])
    return "/".join(parts), "/".join([*tests, f"test_{tested}.py"])


def _made_up_word(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(WORDS)
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))) + rng.choice(ENDINGS)
