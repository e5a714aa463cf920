"""Chat templates: programs of others that turn messages into text.

A template is run on sentinels, each in place of a text, so that what it writes around the texts is known once and the
texts of attempts never pass through it. What it does to a text itself (strips it, quotes it as JSON) is found by a
trial and done here.
"""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

from woodshed.records import ModelError

TEMPLATE_S = 5.0
"""Limit of this thread's processor time for a template with a few short messages, which takes some milliseconds."""

DAY = date(2024, 7, 26)
"""The day that templates print; with today's, the same attempt would read another prompt tomorrow."""

Message = Mapping[str, Any]


def mark(name: str) -> str:
    """A sentinel (private-use characters, which no template touches) that stands for one text."""
    return f"\ue000{name}\ue001"


def said(role: str, name: str) -> Message:
    """A message with a sentinel in place of its text."""
    return {"role": role, "content": mark(name)}


@dataclass(frozen=True)
class Treatment:
    """Changes that a template makes to the text of a message."""

    strips_left: bool = False
    strips_right: bool = False
    quotes: bool = False
    """The text is written as JSON, between quotes that belong to the template's text."""

    def __call__(self, text: str) -> str:
        text = text.lstrip() if self.strips_left else text
        text = text.rstrip() if self.strips_right else text
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.quotes else text


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.name = str(tokenizer.name_or_path)
        if not tokenizer.chat_template:
            raise ModelError(f"{self.name}: no chat template; use an instruction-tuned model")
        self.source = str(tokenizer.chat_template)
        self.arguments_as_text = False
        """The template takes the arguments of calls as JSON text only."""
        self._tokenizer = tokenizer
        self._rendered: dict[str, str] = {}
        full = [said("system", "s"), said("user", "u")]
        self.system_role = self.renders(full)
        self.base: list[Message] = full if self.system_role else full[1:]
        """Messages that open every conversation."""

    def text(self, messages: Sequence[Message], *, opened: bool = True, tools: Any = None) -> str:
        """The template's text for messages, with the opening of the assistant's next one if `opened`; cached, since few
        shapes ever occur.

        Raises:
            ModelError: the template refuses them, breaks or takes too long.
        """
        key = json.dumps([messages, opened, tools])
        if key not in self._rendered:
            try:
                with _limited(TEMPLATE_S):
                    self._rendered[key] = self._tokenizer.apply_chat_template(
                        json.loads(json.dumps(messages)),
                        tools=tools,
                        chat_template=on_one_day(self._tokenizer.get_chat_template(None, tools)),
                        tokenize=False,
                        add_generation_prompt=opened,
                        date_string=DAY.strftime("%d %b %Y"),
                    )
            except Exception as error:  # a template refuses a role, or breaks, by raising what it likes
                raise ModelError(_broken(self.name, error)) from error
        return self._rendered[key]

    def renders(self, messages: Sequence[Message], after: Sequence[Message] = ()) -> bool:
        """True if the template takes these messages after others, and shows the text of each."""
        try:
            text = self.text([*after, *messages])
        except ModelError:
            return False
        return all(message["content"] in text for message in messages)

    def opening(self, messages: Sequence[Message]) -> str:
        """Text that opens the assistant's next message; "" where the template writes none here."""
        shorter, longer = self.text(messages, opened=False), self.text(messages)
        if not longer.startswith(shorter):
            raise ModelError(f"{self.name}: the chat template has no generation prompt")
        return longer[len(shorter) :]

    def calls(self, calls: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Message:
        """An assistant's message with nothing but calls (name, id, arguments)."""
        written = [
            {
                "type": "function",
                "id": call_id,
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments) if self.arguments_as_text else dict(arguments),
                },
            }
            for name, call_id, arguments in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": written}

    def treatment(self, messages: Sequence[Message], index: int) -> Treatment:
        """Treatment of the text of one of the messages."""
        sentinel = str(messages[index]["content"])
        spaced = list(messages)
        spaced[index] = {**messages[index], "content": f' \n"{sentinel}"\n '}
        left, _, right = self.text(spaced).partition(sentinel)
        quotes = left.endswith('\\"')
        before, after = (' \\n\\"', '\\"\\n ') if quotes else (' \n"', '"\n ')
        return Treatment(not left.endswith(before), not right.startswith(after), quotes)


def on_one_day(source: str) -> str:
    """A template that prints `DAY` for today."""
    return re.sub(r"""strftime_now\((["'])(.*?)\1\)""", lambda m: f"{m[1]}{DAY.strftime(m[2])}{m[1]}", source)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Untrusted Python code, such as a template, which a TimeoutError ends after `seconds` of processor time."""
    deadline = time.thread_time() + seconds

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > deadline:
            raise TimeoutError(f"it takes more than {seconds:g} s")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def _broken(folder: str, error: Exception) -> str:
    """Position and cause of a chat template's failure."""
    file = next(
        (f for f in ("chat_template.jinja", "tokenizer_config.json") if Path(folder, f).is_file()), ""
    )
    frames = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == "<template>"]
    line = getattr(error, "lineno", None) or next(reversed(frames), None)
    where = f", line {line} of the chat template" if line else ", its chat template"
    return (
        f"{Path(folder, file)}{where}: {type(error).__name__}: {error}. Mend the template, or take it from the model "
        "that this one was made of"
    )


def filled(text: str, texts: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """(piece, True if it is one of the texts) of a rendered text whose sentinels are the keys of `texts`."""
    sentinels = sorted(map(re.escape, texts), key=len, reverse=True)
    for i, piece in enumerate(re.split(f"({'|'.join(sentinels)})", text) if texts else [text]):
        yield (texts[piece], True) if i % 2 else (piece, False)
