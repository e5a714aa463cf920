"""Detection of hints that contain what could not have been known before their turn.

A teacher that was given the answer teaches the student to guess it. Known are the task, the tools, everything before
the turn, and the turn's own message. Unknown are all later observations, hidden tests and the solution.

Hint, known and unknown text are compared in a normalised spelling (`feedback.spelling`). A hint is refused if it has

- a name that occurs only in unknown text, written as one word or as several;
- a word or a short string of hidden code that is not an everyday word;
- a number of unknown text, in digits or in words; small numbers in words only if they are values, not counts;
- a line of hidden code in words: most of its tokens, or three of them in order;
- four words in a row from unknown text;
- a number of passed tests that the attempt did not see, or anything about rewards.

The rules compare words only: a paraphrase of hidden code is not found. If an honest hint is refused, another answer is
taken.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files

from woodshed.agent.prompt import system_prompt
from woodshed.agent.tools import TOOLS, form
from woodshed.boundary import contained
from woodshed.feedback.spelling import Token, digits, folded, in_digits, joined, readings, stem, tokens
from woodshed.records import Rollout, Task
from woodshed.tokens.codec import CODECS

RUN = 4  # number of equal words in a row that count as a quotation
LONGEST = 32  # longer runs of letters and digits are not a word but an encoding

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
"""Counts of passed tests in sentences that do not mention tests."""
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
"""Words after a small number that make it a count."""
_LIGHT = frozenset(
    "a an the it its this that then and or of in on at for from with by as is are be to so if when not no do does you "
    "your self cls def class import else elif pass there here which each every any all into up out only them they was "
    "were has have had but must should can may would will after before than just also both first next last".split()
)
"""Words that carry no information about code."""


@dataclass(frozen=True)
class _Known:
    """Everything that the policy has read, in the forms that hints and unknown text are compared in."""

    stems: frozenset[str]
    names: frozenset[str]
    numbers: frozenset[str]
    lines: frozenset[tuple[str, ...]]
    counts: frozenset[str]
    """Numbers of tests that passed or failed."""
    runs: frozenset[tuple[str, ...]]
    """Every four words in a row."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> _Known:
        """Everything that several texts say, together."""
        read = [_read(text) for text in texts]
        return cls(*(frozenset().union(*(getattr(one, field.name) for one in read)) for field in fields(cls)))


@dataclass(frozen=True)
class _Secret:
    """Everything that a hint at one turn must not contain."""

    names: dict[str, str]
    """Normalised spelling to the written form."""
    words: frozenset[str]
    numbers: frozenset[str]
    lines: tuple[tuple[str, ...], ...]
    """Tokens of each hidden line."""


def leak(text: str, task: Task, rollout: Rollout, turn: int, *, hidden: Iterable[str] = ()) -> str:
    """The leaked text in a hint, or ""; for a hint that cannot be checked, the reason.

    Args:
        hidden: texts that the policy never sees, such as hidden tests and the original code.
    """
    hidden = list(hidden)
    return contained(lambda: _leak(text, task, rollout, turn, hidden), lambda why: f"the check broke: {why}")


def _leak(text: str, task: Task, rollout: Rollout, turn: int, hidden: Sequence[str]) -> str:
    known = _Known.of([_always(), _before(task, rollout, turn)])
    later = _after(rollout, turn)
    secret = _secret(known, hidden, later)
    words = in_digits(tokens(text))
    return (
        _name(text, words, secret)
        or _number(text, words, secret)
        or _count(text, known)
        or _word(words, secret)
        or _disguised(text, secret)
        or _code(text, secret)
        or _quotation(text, known, "\n".join([*later, *hidden]))
    )


def _before(task: Task, rollout: Rollout, turn: int) -> str:
    parts = [task.instruction, task.test_command, rollout.turns[turn].text]
    for earlier in rollout.turns[:turn]:
        parts += [earlier.text, *(observation.text for observation in earlier.observations)]
    return "\n".join(parts)


@functools.cache
def _always() -> str:
    """Text that every policy reads: the rules, the tools and their forms."""
    parts = [system_prompt(), system_prompt(max_calls=2)]
    for codec in CODECS.values():
        parts += [codec.describe(TOOLS), *(form(tool.name, codec) for tool in TOOLS)]
    parts += [f"{tool.name} {' '.join(tool.parameters['properties'])}: {tool.description}" for tool in TOOLS]
    return "\n".join(parts)


def _after(rollout: Rollout, turn: int) -> list[str]:
    later = [observation.text for observation in rollout.turns[turn].observations]
    for following in rollout.turns[turn + 1 :]:
        later += [following.text, *(observation.text for observation in following.observations)]
    return later


# -- unknown text -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _read(text: str) -> _Known:
    """Everything that one text says; the rules and tools are long, and compared with every hint."""
    found = in_digits(tokens(text))
    return _Known(
        frozenset(stem(token.text) for token in found),
        frozenset(_squashed(name) for name in _names(text)),
        frozenset(digits(token.text) for token in found),
        frozenset(_line(line) for line in text.splitlines()),
        frozenset(_OUTCOME.findall(folded(text))),
        frozenset(_runs([token.text for token in found if token.text.isalnum()])),
    )


def _secret(known: _Known, hidden: Sequence[str], later: Sequence[str]) -> _Secret:
    lines = [line for text in hidden for line in _PROSE.sub("", text).splitlines()]
    code = [line.partition("#")[0] for line in lines]
    names = {_squashed(n): n for n in _names("\n".join([*hidden, *later])) if not n[0].isdigit()}
    short = [part for line in code for part in _short_strings(line)]
    words = {
        t.text for line in [*map(_without_strings, code), *short] for t in tokens(line) if t.text.isalpha()
    }
    everyday = _everyday()
    numbers = {digits(t.text) for t in in_digits(tokens("\n".join([*hidden, *later])))} - {""}
    return _Secret(
        {name: written for name, written in names.items() if len(name) > 2 and name not in known.names},
        frozenset(
            stem(word)
            for word in words
            if len(word) > 2
            and word not in everyday
            and stem(word) not in everyday
            and stem(word) not in known.stems
        ),
        frozenset(numbers - known.numbers),
        tuple(line for line in dict.fromkeys(map(_line, code)) if len(line) > 1 and line not in known.lines),
    )


def _names(text: str) -> list[str]:
    """Names that look like code and not like plain words."""
    return [name for name in _NAME.findall(folded(text)) if re.search(r"[_./\d]|[a-z][A-Z]", name)]


def _squashed(name: str) -> str:
    return re.sub(r"[\W_]", "", name).casefold()


def _short_strings(line: str) -> list[str]:
    found = [a or b for a, b in _STRING.findall(line)]
    return [text for text in found if len(text.split()) <= 3]


def _without_strings(line: str) -> str:
    return _STRING.sub(" ", line)


def _line(line: str) -> tuple[str, ...]:
    """The informative tokens of a line."""
    return tuple(stem(t.text) for t in in_digits(tokens(line)) if t.text not in _LIGHT and t.text != "=")


@functools.cache
def _everyday() -> frozenset[str]:
    """Common words, which a hint may always use."""
    listed = files("woodshed.feedback").joinpath("everyday.txt").read_text(encoding="utf-8")
    words = {token.text for token in tokens(listed + "\n" + _always())} | _LIGHT
    return frozenset(words | {stem(word) for word in words})


# -- text of the hint --------------------------------------------------------------------------------------------------


def _name(text: str, words: Sequence[Token], secret: _Secret) -> str:
    for name in _names(text):
        if _squashed(name) in secret.names:
            return name
    plain = folded(text)
    for whole, start, end in joined(words):
        if whole in secret.names and len(whole) > 3 and not _is_prose(words[start:end]):
            return plain[words[start].start : words[end - 1].end]
    for token in words:
        if token.text in secret.names and len(token.text) > 3 and token.text not in _everyday():
            return token.text
    leet = str.maketrans("013457", "oleast")
    for word in re.findall(r"\w+", plain):
        if len(word) > 3 and re.search(r"[a-z]\d|\d[a-z]", word.casefold()):
            decoded = word.casefold().translate(leet)
            if decoded.replace("_", "") in secret.names or stem(decoded) in secret.words:
                return word
        if len(word) >= LONGEST and not re.fullmatch(r"[a-z_]+", word):
            return word
    return ""


def _is_prose(words: Sequence[Token]) -> bool:
    """True if two tokens that form a name may also be two plain words: "test command" for test_command."""
    return len(words) == 2 and all(len(word.text) > 1 and word.text in _everyday() for word in words)


def _number(text: str, words: Sequence[Token], secret: _Secret) -> str:
    plain = folded(text)
    for number in re.findall(r"\d[\d_,]*", plain):
        if (value := digits(re.sub(r"\D", "", number))) in secret.numbers:
            return value
    for index, token in enumerate(words):
        value = digits(token.text)
        if not value or plain[token.start : token.end].isdecimal():
            continue
        if value in secret.numbers and (len(value) > 2 or int(value) > 10 or _is_value(words, index)):
            return plain[token.start : token.end]
    for whole, start, end in joined(words, 6):
        if len(whole) > 1 and digits(whole) in secret.numbers:
            return plain[words[start].start : words[end - 1].end]
    return ""


def _is_value(words: Sequence[Token], index: int) -> bool:
    """True if a small number in words is a value ("return two", "two times x") and not a count ("two sentences")."""
    before = words[index - 1].text if index else ""
    if before == "a" or before == "the":
        before = words[index - 2].text if index > 1 else ""
    after = [token.text for token in words[index + 1 : index + 3]]
    if after and after[0] in ("*", "+", "-", "/", "%", "**", "//"):
        return True
    return before in _VALUES and not (
        after and (after[0] in _COUNTS or after[-1] in _COUNTS - {"or", "of", "at"})
    )


def _count(text: str, known: _Known) -> str:
    """The sentence that tells a number of passed or failed tests, or a reward; or ""."""
    for sentence in _SENTENCE.split(text):
        words = in_digits(tokens(sentence))
        plain = " ".join(token.text for token in words)
        numbers = [token.text for token in words if token.text.isdigit()]
        has_share = _SHARE.search(plain.replace(" / ", "/")) is not None or "%" in plain
        if _REWARD.search(plain) and (numbers or has_share):
            return sentence.strip()
        is_count = _TOLD.search(plain) is not None
        if not is_count and not (_COUNTED.search(plain) and _ENDED.search(plain)):
            continue
        if (is_count or has_share or numbers) and not (numbers and set(numbers) <= known.counts):
            return sentence.strip()
    return ""


def _word(words: Sequence[Token], secret: _Secret) -> str:
    for token in words:
        if token.text.isalpha() and len(token.text) > 2 and stem(token.text) in secret.words:
            return token.text
    for whole, _, _ in joined(words):
        if len(whole) > 3 and (stem(whole) in secret.words or whole in secret.words):
            return whole
    return ""


def _disguised(text: str, secret: _Secret) -> str:
    for reading in readings(text):
        words = in_digits(tokens(reading))
        leaked = _name(reading, words, secret) or _word(words, secret) if reading != text else ""
        if leaked and leaked[::-1].casefold() not in _everyday():
            return leaked
    return ""


def _code(text: str, secret: _Secret) -> str:
    """The sentence that repeats a hidden line: all informative tokens, or most of them with three in order; or ""."""
    for sentence in [*_SENTENCE.split(text), text]:
        words = _line(sentence)
        for line in secret.lines:
            shared = set(line) & set(words)
            if len(shared) < 2 or len(shared) < 0.6 * len(set(line)):
                continue
            if _weight(shared) >= 2 and (len(shared) == len(set(line)) > 2 or _in_order(line, words) >= 3):
                return sentence.strip()
    return ""


def _weight(words: set[str]) -> float:
    everyday = _everyday()
    return sum(0.5 if word in everyday else 1.0 for word in words)


def _in_order(line: Sequence[str], words: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(words) + 1)
    for token in line:
        before = row[:]
        for index, other in enumerate(words, 1):
            row[index] = before[index - 1] + 1 if token == other else max(before[index], row[index - 1])
    return row[-1]


def _quotation(text: str, known: _Known, unknown: str) -> str:
    said, never_read = (
        _runs([t.text for t in in_digits(tokens(part)) if t.text.isalnum()]) for part in (text, unknown)
    )
    unread = set(never_read) - known.runs
    return next((" ".join(run) for run in said if run in unread), "")


def _runs(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Every `RUN` words in a row."""
    return [tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)]
