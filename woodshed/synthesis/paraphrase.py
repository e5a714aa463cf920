"""Other words for an instruction, by any OpenAI-compatible model; the template stays where the model breaks a rule.

The rules (a reader must not get the answer, and must get what the tests need): no long run of tokens in common with the
original code, every name that the hidden tests use, no names of tests, and from level 3 on no path of the gold patch.
A second question asks which assertions nobody could infer from the text; those are added to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import httpx

from woodshed.engines.http import address
from woodshed.records import SamplerError

MAX_RUN = 12
"""Most tokens in a row that a text may share with the original code."""
Ask = Callable[[str], str]

REWRITE = """\
Rewrite this request to a programmer in your own words, as a colleague would write it. Keep every name in backticks.
Do not write code, do not name tests, do not invent requirements.

{template}

The code that is wanted, for your understanding only; do not quote it:
{gold}
"""
INFER = """\
A skilled engineer reads this request:

{text}

These tests will decide:
{tests}

List each behaviour that a test asserts and that the engineer could not infer from the request, the repository or common
sense. One short line each, starting with "- ", in words, without code. Write "none" if there is none.
"""


@dataclass(frozen=True)
class Wanted:
    """Requirements that a rewritten instruction is checked against."""

    gold: str
    """The original code of what is missing."""
    names: Sequence[str]
    """Names that it must mention."""
    tests: Sequence[str]
    """Fail-to-pass ids, whose test names it may not mention."""
    test_code: str
    paths: Sequence[str]
    """Paths of the gold patch."""
    level: int


def endpoint(url: str, model: str, timeout_s: float = 120.0) -> Ask:
    """A model behind an OpenAI-compatible server.

    Raises (when asked):
        SamplerError: no answer, or one that is not a chat completion.
    """

    def ask(prompt: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        try:
            answer = httpx.post(f"{address(url)}/v1/chat/completions", json=body, timeout=timeout_s)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
            raise SamplerError(f"{url} gave no chat completion for {model!r}: {error}") from None

    return ask


def reword(template: str, wanted: Wanted, ask: Ask) -> tuple[str, list[str]]:
    """The model's text where it keeps the rules, else the template; and the rules that were broken."""
    text = ask(REWRITE.format(template=template, gold=wanted.gold)).strip()
    if broken := faults(text, wanted):
        return template, broken
    answer = ask(INFER.format(text=text, tests=wanted.test_code))
    lines = [line.strip() for line in answer.splitlines() if line.strip().startswith("- ")]
    lines = [line for line in lines if not faults(f"{text}\n{line}", wanted)]
    if lines:
        text += "\n\nThe tests also rely on:\n" + "\n".join(lines)
    return text + "\n", []


def faults(text: str, wanted: Wanted) -> list[str]:
    """The rules that a text breaks, in words."""
    broken = []
    if (run := longest_run(text, wanted.gold)) > MAX_RUN:
        broken.append(f"{run} tokens in a row are the original code's")
    missing = [name for name in wanted.names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    if missing:
        broken.append(f"it does not mention {', '.join(missing)}")
    tests = {test.partition("[")[0].rpartition("::")[2] for test in wanted.tests}
    if named := sorted(name for name in tests if re.search(rf"\b{re.escape(name)}\b", text)):
        broken.append(f"it names the test {named[0]}")
    if wanted.level >= 3 and (paths := [path for path in wanted.paths if path in text]):
        broken.append(f"it names the path {paths[0]}")
    return broken


def longest_run(text: str, gold: str) -> int:
    """Tokens in the longest run that two texts have in common; words and single signs are tokens."""
    ours, theirs = (re.findall(r"\w+|[^\w\s]", part) for part in (text, gold))
    match = SequenceMatcher(None, ours, theirs, autojunk=False).find_longest_match()
    return match.size
