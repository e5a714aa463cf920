"""`woodshed serve`: a policy behind the gateway, from the command line to an answer and Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
from scripted import renderer
from typer.testing import CliRunner

from woodshed.cli import app, serve, terminal
from woodshed.cli.serve import unlimited
from woodshed.engines.scripted import ScriptedEngine
from woodshed.gateway import server
from woodshed.gateway.server import Gateway

ENGINE = """
from woodshed.engines.scripted import ScriptedEngine

def scripted(settings, renderer, model=None):
    return ScriptedEngine(renderer, lambda request: "Hello.")
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_policy_is_served_from_the_command_line_until_it_is_interrupted(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "talk.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    port, answers, told = free_port(), list[str](), threading.Event()

    def tell(text: str) -> None:
        terminal.tell(text)
        told.set()

    monkeypatch.setattr(serve, "tell", tell)
    body = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}

    def talk() -> None:
        transport = httpx.HTTPTransport(verify=False, retries=9)
        with httpx.Client(transport=transport, timeout=60) as http:
            answer = http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
        answers.append(answer.json()["choices"][0]["message"]["content"])
        if told.wait(60):
            os.kill(os.getpid(), signal.SIGINT)

    client = threading.Thread(target=talk)
    client.start()
    command = ["serve", "--policy", str(tiny_model_dir), "--port", str(port), "engine.kind=talk:scripted"]
    result = CliRunner().invoke(app, command)
    client.join()
    assert (result.exit_code, answers) == (0, ["Hello."]), result.output
    assert f"OPENAI_BASE_URL=http://127.0.0.1:{port}/v1" in result.output and "ended" in result.output


def test_clients_that_nobody_admitted_are_forgotten_after_many_turns(monkeypatch):
    monkeypatch.setattr(server, "NEWCOMER_TURNS", 2)
    engine = ScriptedEngine(renderer(), lambda request: "Hello.")
    made = []

    def newcomer(key: str):
        made.append(unlimited(engine, 0))
        return made[-1]

    body = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}
    with Gateway(engine, newcomer=newcomer) as gateway, httpx.Client(verify=False) as client:
        for _ in range(5):
            assert client.post(f"{gateway.url}/v1/chat/completions", json=body).status_code == 200
    assert [len(recording.turns) for recording in made] == [2, 2, 1]


def test_a_policy_that_is_not_there_is_told():
    result = CliRunner().invoke(app, ["serve", "--policy", "none/such/model", "engine.kind=http"])
    assert result.exit_code == 2 and "needs servers" in result.output
