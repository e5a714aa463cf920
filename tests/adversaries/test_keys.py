"""Keys of the person go to servers that the person named, and nowhere that a recipe or a server says."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from woodshed import settings
from woodshed.cli import app
from woodshed.engines import http
from woodshed.engines.http import KEY_SERVERS, EndpointSettings, chat_server
from woodshed.records import (
    RecipeError,
    SamplerError,
    Task,
)


class Listener(ThreadingHTTPServer):
    """Keeps what it was sent; answers with one model, or as told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[str | None] = []
        self.status, self.location = 200, ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Listener  # type: ignore[assignment]

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.seen.append(self.headers["authorization"])
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("location", self.server.location)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m"}], "version": "1"}).encode())


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOODSHED_API_KEY", "our-key")
    monkeypatch.setenv("OTHER_API_KEY", "other-key")
    monkeypatch.setenv(KEY_SERVERS, "")


def ask(listener: Listener, **changes: Any) -> list[str | None]:
    listener.seen.clear()
    with closing(chat_server(EndpointSettings(url=listener.url, **changes))):
        pass
    return sorted(set(listener.seen), key=str)


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "HOME", "GITHUB_TOKEN", "api_key", "_API_KEY", "X_API_KEY\n", "X_API_KEY ", ""],
)
def test_a_recipe_names_no_other_variable_than_a_key(name: str) -> None:
    with pytest.raises(RecipeError, match="api_key_variable"):
        settings.validate(EndpointSettings, {"api_key_variable": name})
    assert EndpointSettings(api_key_variable="OPENAI_API_KEY")


@pytest.mark.usefixtures("keys")
def test_a_key_goes_only_where_the_person_said(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WOODSHED_API_KEY", "OTHER_API_KEY"):
        assert ask(listener, api_key_variable=variable) == [None]
    port = listener.server_port
    for others in (f"127.0.0.1:{port}1", "127.0.0", "localhost", f"evil127.0.0.1:{port}", "*", f":{port}"):
        monkeypatch.setenv(KEY_SERVERS, others)
        assert ask(listener) == [None], others
    for named in ("127.0.0.1", f"127.0.0.1:{port}", f"other.host, 127.0.0.1:{port}"):
        monkeypatch.setenv(KEY_SERVERS, named)
        assert ask(listener) == ["Bearer our-key"], named
    assert ask(listener, api_key_variable="OTHER_API_KEY") == ["Bearer other-key"]
    assert ask(listener, api_key_variable="ABSENT_API_KEY") == [None]


@pytest.mark.usefixtures("keys")
def test_a_server_on_the_command_line_is_named(
    listener: Listener, tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """In the file of a recipe it is not; and the refusal says how to name it."""
    given = [
        "--endpoint",
        listener.url,
        "--model",
        str(tiny_model_dir),
        f"runs={tmp_path}",
    ]
    CliRunner().invoke(app, ["eval", str(tiny_task.folder), *given])
    assert set(listener.seen) == {"Bearer our-key"}
    listener.status = 401
    http.trust("https://api.example.org/v1")
    assert os.environ[KEY_SERVERS].endswith("api.example.org:443")
    os.environ[KEY_SERVERS] = ""
    with pytest.raises(SamplerError, match=rf"export {KEY_SERVERS}=127\.0\.0\.1:{listener.server_port}"):
        ask(listener)


@pytest.mark.usefixtures("keys")
def test_a_redirection_never_carries_the_key(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Listener()
    threading.Thread(target=other.serve_forever, daemon=True).start()
    monkeypatch.setenv(KEY_SERVERS, "127.0.0.1")
    listener.location = f"{other.url}/v1/models"
    for status in (301, 302, 307, 308):
        listener.status = status
        with pytest.raises(SamplerError, match="refused the request"):
            ask(listener)
    assert other.seen == []
    other.shutdown()
    other.server_close()


@pytest.mark.usefixtures("keys")
def test_a_broken_key_is_not_shown(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_SERVERS, "127.0.0.1")
    for key in ("sec ret", "sec\nret", "s\u00e9cret"):
        monkeypatch.setenv("WOODSHED_API_KEY", key)
        with pytest.raises(SamplerError, match="WOODSHED_API_KEY holds") as error:
            ask(listener)
        assert key not in str(error.value)
    with pytest.raises(RecipeError, match="does not belong into an address"):
        settings.validate(EndpointSettings, {"url": "http://api.openai.com:x@127.0.0.1"})
