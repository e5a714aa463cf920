"""Detection of hints that say something that could not have been known before their turn.

A teacher that was told the answer teaches the student to guess it. What was known is the task, the tools, everything
before the turn, and the turn's own message; what was not is everything observed later, hidden tests and the solution.

Hint, known and unknown text are compared in one spelling (`feedback.spelling`). A hint is refused that gives away

- a name that stands only in unknown text, written as one word or as several;
- a word or a short string of hidden code that is no everyday word;
- a number of unknown text, in digits or in words; small numbers in words only where they are values, not counts;
- a line of hidden code in words: most of its tokens, or three of them in their order;
- four words in a row that are quoted;
- how many tests passed, unless the attempt saw it, and anything about rewards.

Rules cannot understand: what is said in other words than the code's passes. Where an honest hint is refused,
another answer is taken.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from woodshed.agent.prompt import system_prompt
from woodshed.agent.tools import TOOLS, form
from woodshed.feedback.spelling import Token, folded, in_digits, joined, readings, stem, tokens
from woodshed.records import Rollout, Task
from woodshed.tokens.codec import CODECS

RUN = 4  # so many words in a row are a quotation
LONGEST = 32  # letters and digits in a row that are no word any more, but a code

_NAME = re.compile(r"[A-Za-z_][\w./]*\w|\d[\d_.,]*\d|\d")
_STRING = re.compile(r"'([^'\n]{1,40})'|\"([^\"\n]{1,40})\"")
_PROSE = re.compile(r'"{3}.*?"{3}|\'{3}.*?\'{3}', re.DOTALL)
_COUNTED = re.compile(r"\b(?:tests?|checks?|cases?|asserts?|assertions?|examples?)\b", re.IGNORECASE)
_ENDED = re.compile(
    r"\b(?:pass\w*|fail\w*|succe\w+|broke\w*|green|red|wrong|right|correct\w*|remain\w*|left|hidden)\b",
    re.IGNORECASE,
)
_SHARE = re.compile(
    r"\b(?:\d+\s*(?:out\s+)?of\s+(?:the\s+)?\d+|most|half|majority|quarter|thirds?|percent|none|all\s+but|nearly|"
    r"almost|several|few|fraction)\b|\d+\s*[/%]",
    re.IGNORECASE,
)
_TOLD = re.compile(
    r"\bhidden (?:tests?|checks?|cases?)\b.*\b(?:pass|fail|succe|green|red)"
    r"|\d (?:out )?of (?:the )?\d+(?:$| .*\b(?:pass|fail|solve|correct))|\d / \d+$|\d (?:passed|failed)\b"
    r"|\b(?:passed|failed) \d|\d pass (?:and )?\d+ fail|\b(?:pass|fail)\w* \d+ (?:(?:out )?of (?:the )?\d|[/%])"
    r"|(?:percent|%).*\b(?:pass|fail)|\b(?:solved?|correct) \d+ (?:out )?of"
)
"""Counts of what passed, where nothing else in the sentence says that tests are meant."""
_OUTCOME = re.compile(r"(\d+) (?:passed|failed|errors?)\b")
_REWARD = re.compile(r"\b(?:rewards?|scored?|graded?|verdict)\b", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?;:])\s+|\n+")

_VALUES = frozenset(
    "return returns returning yield yields give gives giving equal equals be is are was to by plus minus times than "
    "add adds adding subtract subtracts multiply multiplied divide divided over into number value result answer get "
    "gets produce produces expect expects expected become becomes print prints output outputs most least exactly with "
    "constant power modulo == = + - * / % < > 0 1 2 3 4 5 6 7 8 9 10".split()
)
"""Words before a small number that make it a value."""
_COUNTS = frozenset(
    "call calls tool tools sentence sentences line lines file files word words message messages step steps test tests "
    "edit edits change changes place places time times way ways thing things reason reasons command commands argument "
    "arguments path paths turn turns result results paragraph paragraphs short small or of at more attempt attempts "
    "function functions occurrence occurrences match matches comment comments error errors hunk hunks block blocks "
    "by single separate different long whole".split()
)
"""Words behind a small number that make it a count."""
_LIGHT = frozenset(
    "a an the it its this that then and or of in on at for from with by as is are be to so if when not no do does you "
    "your self cls def class import else elif pass there here which each every any all into up out only them they was "
    "were has have had but must should can may would will after before than just also both first next last".split()
)
"""Words that say nothing about code, in hints and in code."""


@dataclass(frozen=True)
class _Secret:
    """Everything that a hint must not say, worked out once for a turn."""

    names: dict[str, str]
    """Spelt as one word: as it is written."""
    words: frozenset[str]
    numbers: frozenset[str]
    lines: tuple[tuple[str, ...], ...]
    """Tokens of each hidden line."""


def leak(text: str, task: Task, rollout: Rollout, turn: int, *, hidden: Iterable[str] = ()) -> str:
    """The text that the hint gives away, or "".

    Args:
        hidden: texts that the policy never sees, such as hidden tests and the original code.
    """
    known = _before(task, rollout, turn)
    hidden, later = list(hidden), _after(rollout, turn)
    secret = _secret(known, hidden, later)
    said = in_digits(tokens(text))
    return (
        _name(text, said, secret)
        or _number(text, said, secret)
        or _count(text, known)
        or _word(said, secret)
        or _disguised(text, secret)
        or _code(text, secret)
        or _quotation(text, known, "\n".join([*later, *hidden]))
    )


def _before(task: Task, rollout: Rollout, turn: int) -> str:
    parts = [_always(), task.instruction, task.test_command, rollout.turns[turn].text]
    for earlier in rollout.turns[:turn]:
        parts += [earlier.text, *(seen.text for seen in earlier.observations)]
    return "\n".join(parts)


@functools.cache
def _always() -> str:
    """Text that every policy is told: the rules of the work, the tools and their forms."""
    parts = [system_prompt(), system_prompt(max_calls=2)]
    for codec in CODECS.values():
        parts += [codec.describe(TOOLS), *(form(tool.name, codec) for tool in TOOLS)]
    parts += [f"{tool.name} {' '.join(tool.parameters['properties'])}: {tool.description}" for tool in TOOLS]
    return "\n".join(parts)


def _after(rollout: Rollout, turn: int) -> list[str]:
    later = [seen.text for seen in rollout.turns[turn].observations]
    for following in rollout.turns[turn + 1 :]:
        later += [following.text, *(seen.text for seen in following.observations)]
    return later


# -- what is secret ----------------------------------------------------------------------------------------------------


def _secret(known: str, hidden: Sequence[str], later: Sequence[str]) -> _Secret:
    seen = in_digits(tokens(known))
    seen_words = {stem(token.text) for token in seen}
    seen_names = {_squashed(name) for name in _names(known)}
    lines = [line for text in hidden for line in _PROSE.sub("", text).splitlines()]
    known_lines = {_line(line) for line in known.splitlines()}
    code = [line.partition("#")[0] for line in lines]
    names = {_squashed(n): n for n in _names("\n".join([*hidden, *later])) if not n[0].isdigit()}
    short = [part for line in code for part in _short_strings(line)]
    words = {
        t.text for line in [*map(_without_strings, code), *short] for t in tokens(line) if t.text.isalpha()
    }
    everyday = _everyday()
    numbers = {t.text for t in in_digits(tokens("\n".join([*hidden, *later]))) if t.text.isdigit()}
    return _Secret(
        {name: written for name, written in names.items() if len(name) > 2 and name not in seen_names},
        frozenset(
            stem(word)
            for word in words
            if len(word) > 2
            and word not in everyday
            and stem(word) not in everyday
            and stem(word) not in seen_words
        ),
        frozenset(numbers - {t.text for t in seen if t.text.isdigit()}),
        tuple(made for made in dict.fromkeys(map(_line, code)) if len(made) > 1 and made not in known_lines),
    )


def _names(text: str) -> list[str]:
    """Names that look like code, not like plain words."""
    return [name for name in _NAME.findall(folded(text)) if re.search(r"[_./\d]|[a-z][A-Z]", name)]


def _squashed(name: str) -> str:
    return re.sub(r"[\W_]", "", name).casefold()


def _short_strings(line: str) -> list[str]:
    found = [a or b for a, b in _STRING.findall(line)]
    return [text for text in found if len(text.split()) <= 3]


def _without_strings(line: str) -> str:
    return _STRING.sub(" ", line)


def _line(line: str) -> tuple[str, ...]:
    """The tokens of a line that say something."""
    return tuple(stem(t.text) for t in in_digits(tokens(line)) if t.text not in _LIGHT and t.text != "=")


@functools.cache
def _everyday() -> frozenset[str]:
    """Words that anybody may say about any code."""
    listed = files("woodshed.feedback").joinpath("everyday.txt").read_text(encoding="utf-8")
    words = {token.text for token in tokens(listed + "\n" + _always())} | _LIGHT
    return frozenset(words | {stem(word) for word in words})


# -- what a hint says --------------------------------------------------------------------------------------------------


def _name(text: str, said: Sequence[Token], secret: _Secret) -> str:
    for name in _names(text):
        if _squashed(name) in secret.names:
            return name
    plain = folded(text)
    for whole, start, end in joined(said):
        if whole in secret.names and len(whole) > 3 and not _is_prose(said[start:end]):
            return plain[said[start].start : said[end - 1].end]
    for token in said:
        if token.text in secret.names and len(token.text) > 3 and token.text not in _everyday():
            return token.text
    leet = str.maketrans("013457", "oleast")
    for word in re.findall(r"\w+", plain):
        if len(word) > 3 and re.search(r"[a-z]\d|\d[a-z]", word.casefold()):
            read = word.casefold().translate(leet)
            if read.replace("_", "") in secret.names or stem(read) in secret.words:
                return word
        if len(word) >= LONGEST and not re.fullmatch(r"[a-z_]+", word):
            return word
    return ""


def _is_prose(words: Sequence[Token]) -> bool:
    """True if two tokens that make up a name may as well be two words: "test command" beside test_command."""
    return len(words) == 2 and all(len(word.text) > 1 and word.text in _everyday() for word in words)


def _number(text: str, said: Sequence[Token], secret: _Secret) -> str:
    plain = folded(text)
    for number in re.findall(r"\d[\d_,]*", plain):
        if (value := str(int(re.sub(r"\D", "", number)))) in secret.numbers or number in secret.numbers:
            return value
    for at, token in enumerate(said):
        if not token.text.isdigit() or plain[token.start : token.end].isdigit():
            continue
        if token.text in secret.numbers and (int(token.text) > 10 or _is_value(said, at)):
            return plain[token.start : token.end]
    for whole, start, end in joined(said, 6):
        if whole.isdigit() and str(int(whole)) in secret.numbers and len(whole) > 1:
            return plain[said[start].start : said[end - 1].end]
    return ""


def _is_value(said: Sequence[Token], at: int) -> bool:
    """True if a small number in words is a value: "return two", "two times x", and not "two short sentences"."""
    before = said[at - 1].text if at else ""
    if before == "a" or before == "the":
        before = said[at - 2].text if at > 1 else ""
    after = [token.text for token in said[at + 1 : at + 3]]
    if after and after[0] in ("*", "+", "-", "/", "%", "**", "//"):
        return True
    return before in _VALUES and not (
        after and (after[0] in _COUNTS or after[-1] in _COUNTS - {"or", "of", "at"})
    )


def _count(text: str, known: str) -> str:
    """Number of tests that passed or failed, or a reward, that the text gives."""
    seen = set(_OUTCOME.findall(folded(known)))
    for sentence in _SENTENCE.split(text):
        words = in_digits(tokens(sentence))
        plain = " ".join(token.text for token in words)
        numbers = [token.text for token in words if token.text.isdigit()]
        has_share = _SHARE.search(plain.replace(" / ", "/")) is not None or "%" in plain
        if _REWARD.search(plain) and (numbers or has_share):
            return sentence.strip()
        told = _TOLD.search(plain) is not None
        if not told and not (_COUNTED.search(plain) and _ENDED.search(plain)):
            continue
        if (told or has_share or numbers) and not (numbers and set(numbers) <= seen):
            return sentence.strip()
    return ""


def _word(said: Sequence[Token], secret: _Secret) -> str:
    for token in said:
        if token.text.isalpha() and len(token.text) > 2 and stem(token.text) in secret.words:
            return token.text
    for whole, _, _ in joined(said):
        if len(whole) > 3 and (stem(whole) in secret.words or whole in secret.words):
            return whole
    return ""


def _disguised(text: str, secret: _Secret) -> str:
    for reading in readings(text):
        said = in_digits(tokens(reading))
        found = _name(reading, said, secret) or _word(said, secret) if reading != text else ""
        if found and found[::-1].casefold() not in _everyday():
            return found
    return ""


def _code(text: str, secret: _Secret) -> str:
    """A hidden line whose tokens a sentence has: all that say something, or three of them in order and most of it."""
    for sentence in [*_SENTENCE.split(text), text]:
        said = _line(sentence)
        for line in secret.lines:
            told = set(line) & set(said)
            if len(told) < 2 or len(told) < 0.6 * len(set(line)):
                continue
            if _weight(told) >= 2 and (len(told) == len(set(line)) > 2 or _in_order(line, said) >= 3):
                return sentence.strip()
    return ""


def _weight(words: set[str]) -> float:
    everyday = _everyday()
    return sum(0.5 if word in everyday else 1.0 for word in words)


def _in_order(line: Sequence[str], said: Sequence[str]) -> int:
    """Length of the longest sequence that both have in this order."""
    row = [0] * (len(said) + 1)
    for token in line:
        before = row[:]
        for at, other in enumerate(said, 1):
            row[at] = before[at - 1] + 1 if token == other else max(before[at], row[at - 1])
    return row[-1]


def _quotation(text: str, known: str, unknown: str) -> str:
    said, known_words, unknown_words = (_words(part) for part in (text, known, unknown))
    told, secret = f" {' '.join(known_words)} ", f" {' '.join(unknown_words)} "
    for start in range(len(said) - RUN + 1):
        run = " ".join(said[start : start + RUN])
        if f" {run} " in secret and f" {run} " not in told:
            return run
    return ""


def _words(text: str) -> list[str]:
    return [token.text for token in in_digits(tokens(text)) if token.text.isalnum()]
