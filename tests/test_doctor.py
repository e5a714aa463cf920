"""What the doctor says about this machine and about endpoints, and what a run keeps about its machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import woodshed
from woodshed import doctor
from woodshed.runs import machine


class Models(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that lists one model, and answers rubbish below /broken."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "tiny"}]} if self.path == "/v1/models" else ["?"]).encode()
        self.send_response(200)
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
    assert check.ok and "serves tiny" in check.detail


def test_an_endpoint_that_answers_something_else(server: str):
    assert not doctor._endpoint(server + "/broken").ok
    assert not doctor._endpoint("nonsense").ok


def test_a_run_knows_what_it_ran_on():
    described = json.loads(json.dumps(machine.describe()))
    assert described["cores"] >= 1 and described["memory_gb"] > 0 and described["cpu"]
    assert {"numpy", "pydantic", "typer"} <= set(described["packages"])
    assert described["woodshed"] == woodshed.__version__
