"""The socket between the two processes: messages of bounded size, depth and number."""

from __future__ import annotations

import json
import socket
from typing import Any

MOST_BYTES = 16 << 20
"""Of one message."""
MOST_MESSAGES = 5_000_000
MOST_TOTAL_BYTES = 2 << 30
DEEPEST = 60
"""Lists inside each other in a value; a container takes two."""
PARTS = 3
"""Of a message: verb, content, news."""


class LineError(Exception):
    """The other process is gone, or what it said is no message."""


class MessageLine:
    """One end. After an error nothing more is sent or received: whoever asks would get somebody else's answer."""

    def __init__(self, end: socket.socket):
        self.end = end
        self.file = end.makefile("rb")
        self.messages = self.bytes = 0
        self.broken = ""

    def send(self, message: list) -> None:
        if self.broken:
            raise LineError(self.broken)
        try:
            data = json.dumps(message, check_circular=False).encode()
        except (RecursionError, ValueError):
            raise ValueError("a value too deep to be sent to another process") from None
        if len(data) > MOST_BYTES:
            raise ValueError(f"a value of {len(data)} bytes is too large for another process")
        try:
            self.end.sendall(len(data).to_bytes(4, "little") + data)
        except BaseException:
            self.broken = "the process of the code under test has gone"
            raise

    def close(self) -> None:
        self.file.close()
        self.end.close()

    def receive(self) -> tuple[str, list, dict]:
        """The next message: verb or kind of answer, content, news."""
        if self.broken:
            raise LineError(self.broken)
        self.broken = "the process of the code under test has gone or was interrupted"
        size = int.from_bytes(self.file.read(4), "little")
        data = self.file.read(size) if 0 < size <= MOST_BYTES else b""
        self.messages += 1
        self.bytes += size
        if len(data) != size or not data:
            raise LineError(self.broken)
        if self.messages > MOST_MESSAGES or self.bytes > MOST_TOTAL_BYTES:
            raise LineError("too much was said between the processes")
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            raise LineError("no message") from None
        if not is_message(message):
            raise LineError("no message")
        self.broken = ""
        return message[0], message[1], message[2]


def is_message(message: Any) -> bool:
    """True for [text, list, object] whose lists are not nested too deeply."""
    if type(message) is not list or len(message) != PARTS:
        return False
    if not (type(message[0]) is str and type(message[1]) is list and type(message[2]) is dict):
        return False
    level, depth = [message[1], message[2]], 0
    while level:
        depth += 1
        if depth > 2 * DEEPEST:
            return False
        inner: list = []
        for item in level:
            inner += item.values() if type(item) is dict else item
        level = [item for item in inner if type(item) is list or type(item) is dict]
    return True
