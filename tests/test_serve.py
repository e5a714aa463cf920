"""`woodshed serve`: a policy behind the gateway, from the command line to an answer and Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from scripted import renderer
from typer.testing import CliRunner

from woodshed.cli import app
from woodshed.cli.serve import unlimited
from woodshed.engines.scripted import ScriptedEngine
from woodshed.gateway import server
from woodshed.gateway.server import Gateway

ENGINE = """
import sys
sys.path.insert(0, {tests!r})
from scripted import renderer
from woodshed.engines.scripted import ScriptedEngine

def scripted(settings, given, model=None):
    return ScriptedEngine(given, lambda request: "Hello.")
"""


def test_a_policy_is_served_from_the_command_line_until_it_is_interrupted(
    tmp_path: Path, tiny_model_dir: Path
):
    (tmp_path / "talk.py").write_text(ENGINE.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "woodshed", "serve", "--policy", str(tiny_model_dir), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [*command, "engine.kind=talk:scripted"],
        cwd=tmp_path,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "OPENAI_BASE_URL" in line)
        url = re.search(r"http://[^ ]*", line)
        assert url is not None
        body = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}
        answer = httpx.post(f"{url[0]}/chat/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello.", answer.text
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and "ended" in said
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


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
