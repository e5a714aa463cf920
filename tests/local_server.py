"""A local model behind vLLM's protocol, on a thread of the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from woodshed.engines.local.server import LocalServer, ServerSettings


@contextmanager
def serving(
    model: Path, port: int = 0, prepare: Callable[[LocalServer], object] = lambda server: None
) -> Iterator[tuple[str, LocalServer]]:
    """Address and server of a model.

    Args:
        prepare: changes the server before it begins.
    """
    server = LocalServer.load(ServerSettings(model=str(model)))
    prepare(server)
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=server.run, args=[listener])
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
        finally:
            server.stop()
            thread.join()
