"""A program that runs inside a sandbox: a loopback port that leads to a unix socket, while a command runs.

    python forward.py SOCKET PORT COMMAND...

A sandbox has no network. The gateway's socket is shown in it as a file, and agents speak HTTP to a port, so this
carries bytes between the two, and exits as the command does. Standard library only.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading


def carry(source: socket.socket, target: socket.socket) -> None:
    """Carry bytes one way until the source ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def serve(listener: socket.socket, path: str) -> None:
    """Connect everybody who comes to the socket."""
    while True:
        try:
            ours = listener.accept()[0]
            theirs = socket.socket(socket.AF_UNIX)
            theirs.connect(path)
        except OSError:
            return
        for pair in ((ours, theirs), (theirs, ours)):
            threading.Thread(target=carry, args=pair, daemon=True).start()


def main() -> int:
    """Serve while the command runs: its exit status."""
    path, port, *command = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=64)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what was read is passed on at once
    threading.Thread(target=serve, args=(listener, path), daemon=True).start()
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
