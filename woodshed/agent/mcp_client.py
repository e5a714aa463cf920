"""One request to a server of the Model Context Protocol over its stdin and stdout.

Runs inside the sandbox, in any Python from 3.8 on, and starts the server there. Reads {"server": source, "method": ...,
"params": ...} from stdin and writes the result, or {"error": text}, to file descriptor 3. Standard library only.
"""

# ruff: noqa: PTH123

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

VERSION = "2025-06-18"
"""Version of the protocol; servers answer with the newest one that they know."""


class Server:
    """A server that was started and greeted."""

    def __init__(self, path):
        process = subprocess.Popen(
            [sys.executable, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin
        assert process.stdout
        self.requests, self.answers = process.stdin, process.stdout
        self.count = 0
        client = {"name": "woodshed", "version": "1"}
        self.ask("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client})
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def send(self, message):
        self.requests.write(json.dumps(message).encode() + b"\n")
        self.requests.flush()

    def ask(self, method, params):
        """The result of a request. Raises ValueError with the server's error, or where it says nothing."""
        self.count += 1
        self.send({"jsonrpc": "2.0", "id": self.count, "method": method, "params": params})
        for line in self.answers:
            answer = json.loads(line)
            if answer.get("id") != self.count or "method" in answer:
                continue  # a notification, or a request of the server's
            if "error" in answer:
                raise ValueError(answer["error"].get("message", "an error"))
            return answer["result"]
        raise ValueError("the server ended without an answer")


def main():
    request = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "server.py")  # noqa: PTH118
        with open(path, "w", encoding="utf-8") as file:
            file.write(request["server"])
        try:
            result = Server(path).ask(request["method"], request["params"])
        except (ValueError, OSError, KeyError, AttributeError) as error:
            result = {"error": str(error)}
    with os.fdopen(3, "w") as channel:
        json.dump(result, channel)


if __name__ == "__main__":
    main()
