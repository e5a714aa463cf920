"""Normalised spelling, in which hints are compared with known and with hidden text.

Full-width, zero-width, accented and look-alike letters, split and joined names, numbers in words and operators in words
all become the same tokens: "Return X times two", "return x*2" and "r e t u r n  x * 2" are equal.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import functools
import html
import re
import unicodedata
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ALIKE = str.maketrans(
    "\u0430\u0431\u0435\u043e\u0440\u0441\u0443\u0445\u0455\u0456\u0458\u04bb\u0501\u051b\u051d\u0432\u043a\u043c"
    "\u043d\u0442\u0433\u043f\u03b9\u03bf\u03b1\u03bd\u03c1\u03c4\u03c5\u03ba\u03c7\u0251\u0131",
    "abeopcyxsijhdqwbkmhtrnioavptukxai",
)
"""Cyrillic, Greek and other letters that look like Latin ones."""
_TOKEN = re.compile(r"[^\W\d_]+|\d+|\*\*|//|==|!=|<=|>=|[+*/%<>=\u00d7\u00f7]|-(?![^\W\d_])|(?<![^\W\d_])-")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_OPERATORS = {
    "plus": "+",
    "minus": "-",
    "times": "*",
    "multiply": "*",
    "multiplied": "*",
    "divide": "/",
    "divided": "/",
    "modulo": "%",
    "equals": "==",
    "equal": "==",
    "\u00d7": "*",
    "\u00f7": "/",
}
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
_VALUES = {word: n for n, word in enumerate(_SMALL)} | {word: 10 * n for n, word in enumerate(_TENS) if n > 1}
_VALUES |= {"dozen": 12, "fourty": 40, "twice": 2, "thrice": 3}
MOST = 10**15
"""Limit of a number in words; words past it begin another number."""
_SCALES = {"hundred": 100, "thousand": 1000, "million": 1_000_000}


@dataclass(frozen=True)
class Token:
    """A normalised word, number or operator."""

    text: str
    start: int
    """Position in the folded text."""
    end: int


def folded(text: str) -> str:
    """Text without compatibility letters, accents, look-alikes and invisible characters; case is kept, since names are
    split at it."""
    if text.isascii():
        return text
    plain = unicodedata.normalize("NFKD", text)
    visible = "".join(c for c in plain if unicodedata.category(c) not in ("Cf", "Mn", "Me", "Cs", "Co", "Lm"))
    return "".join(_lowered(c) for c in unicodedata.normalize("NFKC", visible))


def _lowered(character: str) -> str:
    if character.isascii():
        return character
    alike = character.casefold().translate(_ALIKE)
    return alike.upper() if character.isupper() and alike.isascii() else alike


def tokens(text: str) -> list[Token]:
    """Words in lower case, names split into words; numbers as digits; operators as signs."""
    plain = folded(text)
    result: list[Token] = []
    for match in _TOKEN.finditer(plain):
        start = match.start()
        for part in _CAMEL.split(match[0]) if match[0].isalpha() else [match[0]]:
            word = part.casefold()
            result.append(Token(_OPERATORS.get(word, word), start, start + len(part)))
            start += len(part)
    return result


def in_digits(words: Sequence[Token]) -> list[Token]:
    """Tokens with numbers in words replaced by digits ("forty two" by 42)."""
    result: list[Token] = []
    index = 0
    while index < len(words):
        number, end = _number(words, index)
        if end == index:
            result.append(words[index])
            index += 1
        else:
            result.append(Token(str(number), words[index].start, words[end - 1].end))
            index = end
    return result


def _number(words: Sequence[Token], index: int) -> tuple[int, int]:
    """The number in words that begins at an index, and the index after it; the same index if none begins there."""
    total = part = 0
    start, last = index, 0
    while index < len(words):
        word = words[index].text
        if (value := _VALUES.get(word)) is not None and total <= MOST:
            if index > start and not ((last >= 20 and value < 10) or last in (100, 1000)):
                break
            part, last = part + value, value
        elif word in _SCALES and (index > start or word != "million") and 0 < part <= MOST:
            part, last = part * _SCALES[word], min(_SCALES[word], 1000)
            if last == 1000:
                total, part = total + part, 0
        elif not (
            word == "and"
            and last in (100, 1000)
            and index + 1 < len(words)
            and words[index + 1].text in _VALUES
        ):
            break
        index += 1
    return total + part, index


def digits(text: str) -> str:
    """The canonical spelling of a number of any length; "" if the text is not a number.

    Digits of all scripts count, including those that `int` does not accept.
    """
    if not text.isdigit():
        return ""
    return "".join(str(unicodedata.digit(character)) for character in text).lstrip("0") or "0"


def joined(words: Sequence[Token], most: int = 24) -> Iterator[tuple[str, int, int]]:
    """All runs of tokens joined into one word: the word, the index of its first token, and the index after its last."""
    for start in range(len(words)):
        whole = ""
        for end in range(start, min(start + most, len(words))):
            if not words[end].text.isalnum():
                continue
            whole += words[end].text
            if end > start:
                yield whole, start, end + 1


def readings(text: str) -> Iterator[str]:
    """Decodings of a text: entities and escapes, base64, hexadecimal, rot13, reversed."""
    yield html.unescape(urllib.parse.unquote(text))
    yield re.sub(
        r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})", lambda m: chr(int(m[1] or m[2], 16)), text, flags=re.IGNORECASE
    )
    yield codecs.encode(text, "rot13")
    yield text[::-1]
    for word in re.findall(r"[\w+/]{8,}=*", text):
        with contextlib.suppress(ValueError):
            yield base64.b64decode(word + "=" * (-len(word) % 4), validate=True).decode("ascii")
        with contextlib.suppress(ValueError):
            yield bytes.fromhex(word).decode("ascii")


@functools.lru_cache(maxsize=4096)
def stem(word: str) -> str:
    """A word without its ending, roughly: "splitting" and "splits" become "split"."""
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word.removesuffix(ending)
            break
    if len(word) > 3 and word[-1] == word[-2]:
        word = word[:-1]
    return word.removesuffix("e") if len(word) > 3 else word
