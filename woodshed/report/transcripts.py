"""Transcripts in the page: compressed archives that the browser opens on demand.

An archive holds up to `PER_ARCHIVE` attempts at one task, because attempts at one task read the same files: every
text is kept once and named by its number. Archive: {"s": texts, "r": rollouts}. A rollout:

    t   its turns            d   unified diff         k   paths that grading does not take, with the reason
    n   expected tests       f   those that did not pass, with their outcome
    i   integrity checks     x   last output of the runner

A turn: m message, e error kind, o observations (text, error kind, seconds), c edits in it (path, old, new), v policy
version, x whether it was cut off, p planted fault, s seconds of sampling and of tools, h hints (detector, text),
l log-prob per token, n length of each token's text, and of a targeted turn q student, w teacher and g divergence.

Numbers per token are one character each: `level(v)` says how a log-prob or a divergence becomes a level from 0 to 90
(the square root is fine near zero, where most tokens are), and the character is chr(35 + level).
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from woodshed.agent.effects import effect
from woodshed.records import Hint, Rollout, TokenDivergence, Turn, Verdict
from woodshed.report.words import WordIndex, words

PER_ARCHIVE = 64
MAX_BYTES = (
    24_000_000  # of archives in one page; the page says how many rollouts it lists without a transcript
)
MAX_FAILED = 50  # failed tests listed per rollout


@dataclass(frozen=True)
class Remarks:
    """Remarks on one rollout besides its verdict, by turn."""

    hints: Mapping[int, Sequence[Hint]] = field(default_factory=dict)
    token_divergences: Mapping[int, TokenDivergence] = field(default_factory=dict)


@dataclass
class Archive:
    """Attempts at one task."""

    texts: dict[str, int] = field(default_factory=dict)
    words_of: list[set[str]] = field(default_factory=list)
    """Words of each text."""
    rollouts: list[bytes] = field(default_factory=list)

    def text(self, text: str, found_words: set[str]) -> int:
        """The number of a text; its words go into `found_words`."""
        number = self.texts.setdefault(text, len(self.texts))
        if number == len(self.words_of):
            self.words_of.append(words(text))
        found_words |= self.words_of[number]
        return number

    def pack(self) -> str:
        """The archive for the page: base64 of deflated JSON."""
        texts = dump(list(self.texts))
        return pack(b'{"s":' + texts + b',"r":[' + b",".join(self.rollouts) + b"]}")


class Archives:
    """All transcripts of a page, and the index of their words."""

    def __init__(self) -> None:
        self.index = WordIndex()
        self._archives: list[Archive] = []
        self._open: dict[tuple[int, str], int] = {}
        self._count = 0

    def add(
        self,
        run: int,
        rollout: Rollout,
        verdict: Verdict | None,
        num_tests: int,
        remarks: Remarks,
        token_texts: Mapping[int, str],
    ) -> tuple[int, int]:
        """Keep a rollout; return the number of its archive and its index there."""
        number = self._open.get((run, rollout.task_id))
        if number is None or len(self._archives[number].rollouts) >= PER_ARCHIVE:
            number = self._open[run, rollout.task_id] = len(self._archives)
            self._archives.append(Archive())
        archive = self._archives[number]
        found_words = words(rollout.task_name)
        packed = _rollout(archive, rollout, verdict, num_tests, remarks, token_texts, found_words)
        archive.rollouts.append(dump(packed))
        self.index.add(self._count, found_words)
        self._count += 1
        return number, len(archive.rollouts) - 1

    def pack(self) -> tuple[list[str], int]:
        """Archives for the page, those of the newest tasks left out ("") beyond `MAX_BYTES`; and the rollouts left
        out."""
        with ThreadPoolExecutor(2) as pool:  # zlib lets go of the interpreter
            packed = list(pool.map(Archive.pack, self._archives))
        size = num_left_out = 0
        for number, text in enumerate(packed):
            size += len(text)
            if size > MAX_BYTES:
                packed[number] = ""
                num_left_out += len(self._archives[number].rollouts)
        return packed, num_left_out


def pack(data: bytes) -> str:
    """Base64 of deflated bytes, as the page carries everything big."""
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def dump(value: Any) -> bytes:
    """JSON that a browser can read: lone surrogates are replaced, whole numbers beyond 53 bits become text."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_STRICT_INTEGER
    try:
        return orjson.dumps(value, option=options)
    except (TypeError, ValueError):
        return orjson.dumps(clean(value), option=options)


def clean(value: Any) -> Any:
    """The same value with the replacements of `dump`."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, int) and abs(value) >= 2**53:
        return str(value)
    if isinstance(value, Mapping):
        return {clean(key): clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


def level(values: Sequence[float]) -> np.ndarray:
    """Levels from 0 to 90 of log-probs or divergences: 20 * sqrt(|v|), so 20 is one nat and 90 twenty and more."""
    with np.errstate(invalid="ignore"):
        levels = np.rint(20.0 * np.sqrt(np.abs(np.asarray(values, dtype=float))))
    return np.nan_to_num(levels, nan=90.0).clip(0, 90).astype(np.uint8)


def characters(values: Sequence[float]) -> str:
    return (level(values) + 35).tobytes().decode("ascii")


def texts_of_tokens(turn: Turn, token_texts: Mapping[int, str]) -> list[str] | None:
    """The part of the message that each token wrote; None if the token texts do not add up to the message.

    Where a character is spread over tokens, none of their texts can be read alone (U+FFFD): the first of them gets
    the text up to the next one that can.
    """
    parts = [token_texts.get(i, "\ufffd") for i in turn.sampled_ids]
    return parts if "".join(parts) == turn.text else _aligned(turn.text, parts)


def token_lengths(turn: Turn, token_texts: Mapping[int, str]) -> str:
    """Number of UTF-16 units that each token wrote, as chr(35 + length); "" if that is not known."""
    parts = texts_of_tokens(turn, token_texts) if token_texts else None
    return "" if parts is None else "".join(map(_length, parts))


@functools.lru_cache(maxsize=2**16)
def _length(part: str) -> str:
    return chr(35 + _units(part))


def _units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _aligned(text: str, parts: Sequence[str]) -> list[str] | None:
    """Token texts that cannot be read alone, replaced by the stretch of text between their neighbours."""
    aligned: list[str] = []
    position = 0
    for number, part in enumerate(parts):
        if "\ufffd" in part and not text.startswith(part, position):
            after = next((p for p in parts[number + 1 :] if p and "\ufffd" not in p), "")
            end = text.find(after, position) if after else len(text)
            is_first = not number or "\ufffd" not in parts[number - 1]
            part = text[position:end] if is_first and end >= 0 else ""
        elif not text.startswith(part, position):
            return None
        aligned.append(part)
        position += len(part)
    return aligned if position == len(text) else None


def _rollout(
    archive: Archive,
    rollout: Rollout,
    verdict: Verdict | None,
    num_tests: int,
    remarks: Remarks,
    token_texts: Mapping[int, str],
    found_words: set[str],
) -> dict[str, Any]:
    logps = characters([v for turn in rollout.turns for v in turn.logps])
    turns, position = [], 0
    for number, turn in enumerate(rollout.turns):
        packed = _turn(archive, turn, found_words)
        packed["l"] = logps[position : position + len(turn.logps)]
        position += len(turn.logps)
        packed["n"] = token_lengths(turn, token_texts)
        packed["b"] = segment_note(rollout, number)
        packed["h"] = [[h.detector, archive.text(h.text, found_words)] for h in remarks.hints.get(number, ())]
        if divergence := remarks.token_divergences.get(number):
            sides = (divergence.student, divergence.teacher, divergence.divergence)
            packed |= dict(zip("qwg", map(characters, sides), strict=True))
        turns.append({name: value for name, value in packed.items() if value not in ("", [], None)})
    patch = rollout.patch
    packed = {"t": turns, "d": archive.text(patch.diff, found_words), "k": list(patch.skipped.items())}
    if verdict is not None:
        failed = list(verdict.outcomes.items())[:MAX_FAILED]
        packed |= {
            "n": num_tests,
            "N": len(verdict.outcomes),
            "f": [[archive.text(test, found_words), outcome] for test, outcome in failed],
            "i": verdict.integrity,
            "x": archive.text(verdict.detail, found_words),
        }
    return packed


BREAKS = {
    "thoughts": "the chat template drops earlier thoughts",
    "summary": "behind the policy's own summary",
    "history": "the agent rewrote its messages",
    "agent": "the agent called another one",
}


def segment_note(rollout: Rollout, number: int) -> str:
    """The segment that begins with a turn, or that a turn goes back to, and why; "" where one just goes on."""
    turn = rollout.turns[number]
    if turn.begins:
        return f"segment {turn.segment} begins: {BREAKS.get(turn.begins, turn.begins)}"
    is_back = number > 0 and rollout.turns[number - 1].segment != turn.segment
    return f"back in segment {turn.segment}" if is_back else ""


def written_by(turn: Turn) -> str:
    """The policy versions of a turn's tokens: "3", or "3 to 4" where weights changed in the middle."""
    versions = [str(version) for version, _ in turn.versions]
    return " to ".join(dict.fromkeys([*versions[:1], *versions[-1:]]))


def _turn(archive: Archive, turn: Turn, found_words: set[str]) -> dict[str, Any]:
    edits = [
        [done.path, archive.text(done.old, found_words), archive.text(done.new, found_words)]
        for done in (effect(call) for call in turn.calls if call.error_kind is None)
        if done.kind == "write"
    ]
    return {
        "m": archive.text(turn.text, found_words),
        "e": turn.error_kind,
        "o": [
            [archive.text(o.text, found_words), o.error_kind or "", round(o.seconds, 2)]
            for o in turn.observations
        ],
        "c": edits,
        "v": written_by(turn),
        "x": turn.finish_reason == "length" or None,
        "p": turn.oracle,
        "s": [round(turn.sample_s, 2), round(turn.tools_s, 2)],
    }
