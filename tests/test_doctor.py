"""What the doctor says about this machine and about endpoints, and what a run keeps about its machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import woodshed
from woodshed import doctor
from woodshed.engines.http import KEY_SERVERS, EndpointSettings
from woodshed.engines.speech import refuse_text_only
from woodshed.records import SamplerError
from woodshed.runs import machine

SPOKEN = {
    "/v1/completions": {"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}},
    "/v1/chat/completions": {"message": {"content": "yes"}},
}


class Models(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that lists one model, speaks as told, and answers rubbish below /broken."""

    paths = frozenset(SPOKEN)
    limit = "max_tokens"
    key = ""

    def do_GET(self) -> None:
        is_open = self.headers["authorization"] == (f"Bearer {self.key}" if self.key else None)
        self.answer(
            200 if is_open else 401, {"data": [{"id": "tiny"}]} if self.path == "/v1/models" else ["?"]
        )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_known = self.path in self.paths and self.limit in asked
        self.answer(200, {"choices": [SPOKEN[self.path]]}) if is_known else self.answer(404, {"error": "no"})

    def answer(self, status: int, said: object) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Models) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}"
        served.shutdown()
        thread.join()


def test_every_no_says_what_to_do():
    checks = list(doctor.examine(endpoint="http://127.0.0.1:9"))
    names = [check.name for check, _ in checks]
    assert names[0] == "python" and names[-1] == "endpoint"
    assert {"bubblewrap", "disk", "memory", "torch"} <= set(names)
    assert all(check.remedy for check, _ in checks if not check.ok)
    refused, is_needed = checks[-1]
    assert not refused.ok and is_needed and "http://127.0.0.1:9" in refused.detail


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_an_endpoint_that_answers(server: str, suffix: str):
    check = doctor._endpoint(server + suffix)
    assert check.ok and "serves tiny, and takes token ids" in check.detail


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_server_of_text_is_told_from_one_of_token_ids(
    server: str, limit: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Models, "paths", {"/v1/chat/completions"})
    monkeypatch.setattr(Models, "limit", limit)
    check = doctor._endpoint(server)
    assert check.ok and "as text only" in check.detail and "engine.kind=chat" in check.detail
    with pytest.raises(SamplerError, match=r"speaks text only.*status 404.*Add engine.kind=chat.*\(tiny\)"):
        refuse_text_only([EndpointSettings(url=server)])
    monkeypatch.setattr(Models, "paths", set())
    check = doctor._endpoint(server)
    assert not check.ok and "answers no message: /v1/completions answered with status 404" in check.detail


def test_the_key_that_other_programs_read_is_taken(server: str, monkeypatch: pytest.MonkeyPatch):
    """Ours comes first; where neither is set, both are named."""
    monkeypatch.setenv(KEY_SERVERS, "")
    monkeypatch.delenv("WOODSHED_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(Models, "key", "sesame")
    check = doctor._endpoint(server)
    assert not check.ok and "variable WOODSHED_API_KEY or OPENAI_API_KEY" in check.detail
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert doctor._endpoint(server).ok
    monkeypatch.setenv("WOODSHED_API_KEY", "other")
    assert not doctor._endpoint(server).ok


def test_an_endpoint_that_answers_something_else(server: str):
    assert not doctor._endpoint(server + "/broken").ok
    assert not doctor._endpoint("nonsense").ok


def test_a_run_knows_what_it_ran_on():
    described = json.loads(json.dumps(machine.describe()))
    assert described["cores"] >= 1 and described["memory_gb"] > 0 and described["cpu"]
    assert {"numpy", "pydantic", "typer"} <= set(described["packages"])
    assert described["woodshed"] == woodshed.__version__
