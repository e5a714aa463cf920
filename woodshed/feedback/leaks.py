"""Whether a hint says something that could not have been known before its turn.

A teacher that was told the answer teaches the student to guess it. What was known is the task, everything before the
turn, and the turn's own message; what was not is everything observed later, and hidden tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from woodshed.records import Rollout, Task

RUN = 4  # so many words in a row are a quotation

_CODE = re.compile(r"[A-Za-z_][\w./]*[\w]|\d[\d.]*\d")
_WORD = re.compile(r"\w+(?:'\w+)?")


def leak(text: str, task: Task, rollout: Rollout, turn: int, *, hidden: Iterable[str] = ()) -> str:
    """What the hint gives away, or "".

    A name (with an underscore, a dot, a slash, a digit or capitals inside) or a number that occurs only later or in
    hidden text; or a run of four words that is quoted from there.

    Args:
        hidden: texts that the policy never sees, such as hidden tests and the original code.
    """
    known = _before(task, rollout, turn)
    unknown = "\n".join([*_after(rollout, turn), *hidden])
    names_known, names_unknown = set(_names(known)), set(_names(unknown))
    for name in _names(text):
        if name in names_unknown and name not in names_known:
            return name
    known_words, unknown_words = (" " + " ".join(_words(part)) + " " for part in (known, unknown))
    words = _words(text)
    for start in range(len(words) - RUN + 1):
        run = " ".join(words[start : start + RUN])
        if f" {run} " in unknown_words and f" {run} " not in known_words:
            return run
    return ""


def _before(task: Task, rollout: Rollout, turn: int) -> str:
    parts = [task.instruction, task.test_command, rollout.turns[turn].text]
    for earlier in rollout.turns[:turn]:
        parts += [earlier.text, *(seen.text for seen in earlier.observations)]
    return "\n".join(parts)


def _after(rollout: Rollout, turn: int) -> list[str]:
    later = [seen.text for seen in rollout.turns[turn].observations]
    for following in rollout.turns[turn + 1 :]:
        later += [following.text, *(seen.text for seen in following.observations)]
    return later


def _names(text: str) -> list[str]:
    """What looks like code: names that are no plain words, and numbers of several digits."""
    found = _CODE.findall(text)
    return [name for name in found if re.search(r"[_./\d]|[a-z][A-Z]", name)]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
