"""Other words for instructions: the rules, and a real server on this machine that keeps or breaks them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from woodshed.records import SamplerError
from woodshed.synthesis import paraphrase
from woodshed.synthesis.paraphrase import Wanted

GOLD = "def area(w, h):\n    scale = max(w, h) or 1\n    return (w / scale) * (h / scale) * scale ** 2\n"
WANTED = Wanted(
    GOLD, ["area"], ["tests/test_a.py::test_area_of_squares[1]"], "assert area(2, 2) == 4", ["p/a.py"], 3
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Please write `area` again, it computes what a rectangle covers.", ""),
        ("Please write it again.", "does not mention area"),
        ("`area` must pass test_area_of_squares.", "names the test test_area_of_squares"),
        ("`area` belongs to p/a.py.", "names the path p/a.py"),
        ("`area`: return (w / scale) * (h / scale) * scale ** 2", "tokens in a row"),
    ],
)
def test_rules(text: str, fault: str):
    found = paraphrase.faults(text, WANTED)
    assert [fault in line for line in found] == ([True] if fault else [])


def test_runs_are_counted_in_tokens():
    assert paraphrase.longest_run("x = a + b, then", "y = a + b") == 4


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A server that answers with the texts of a list, one after the other, and then with nonsense."""
    answers: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            choices = [{"message": {"content": answers.pop(0)}}] if answers else []
            data = json.dumps({"choices": choices}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/v1", answers
        running.shutdown()


def test_a_model_rewords_and_what_cannot_be_inferred_is_added(server: tuple[str, list[str]]):
    url, answers = server
    ask = paraphrase.endpoint(url, "any")
    answers += ["We need `area` back.", "Some thoughts\n- squares have equal sides\n- test_area_of_squares\n"]
    text, faults = paraphrase.reword("Add `area`.", WANTED, ask)
    assert (
        text == "We need `area` back.\n\nThe tests also rely on:\n- squares have equal sides\n" and not faults
    )
    answers += ["We need it back."]
    assert paraphrase.reword("Add `area`.", WANTED, ask) == ("Add `area`.", ["it does not mention area"])
    with pytest.raises(SamplerError, match="gave no chat completion for 'any'"):
        paraphrase.reword("Add `area`.", WANTED, ask)
