"""Evaluating against a server that misbehaves: clear messages, exit codes, nothing finished is lost or made twice."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import tiny_tokenizer
from typer.testing import CliRunner

from woodshed import doctor
from woodshed.cli import app
from woodshed.engines import expert_log
from woodshed.engines.chat import ChatEngine
from woodshed.engines.engine import SampleRequest, sample_all
from woodshed.engines.http import EndpointSettings, HttpEngine
from woodshed.evals import ledger
from woodshed.records import Observation, RecipeError, Rollout, SamplerError, Task
from woodshed.runs.folder import RunDir
from woodshed.settings import read
from woodshed.stages.preflight import refuse
from woodshed.stages.recipe import Recipe
from woodshed.tasks import folder
from woodshed.tokens.renderer import create_renderer
from woodshed.tokens.text_renderer import TextRenderer

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
REQUEST = SampleRequest((1, 5, 6), 200, 0)


class Server(ThreadingHTTPServer):
    """Answers every prompt with a call to `finish`, honestly unless told otherwise."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.renderer = create_renderer(tiny_tokenizer(), codec="plain")
        self.ids = self.renderer.encode_message("<call>finish</call>")
        self.spoil: dict[str, Any] = {}
        """Merged into the answer; "choice" into the choice."""
        self.script: list[int] = []
        """Statuses of the next completions, 0 drops the connection half way; then `otherwise`."""
        self.otherwise = 200
        self.completions = 0
        self.bodies: list[Any] = []
        """Requests for messages."""
        self.said: Any = {
            "choices": [{"message": {"content": "<call>finish</call>"}, "finish_reason": "stop"}]
        }
        self.recorded: list[tuple[int, ...]] = []
        """Messages that come first."""
        self.refused_limit = ""
        self.refusal = {"error": "Unsupported parameter: use 'max_completion_tokens' instead."}
        self.models: Any = {"data": [{"id": "tiny", "max_model_len": 8192}]}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(200, {"version": "0.99"} if self.path == "/version" else self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = self.server.script.pop(0) if self.server.script else self.server.otherwise
        self.server.completions += status == 200
        self.server.bodies.append(body)
        if self.path == "/v1/chat/completions":
            refused = self.server.refused_limit in body
            self.answer(400 if refused else status, self.server.refusal if refused else self.server.said)
            return
        whole = self.server.recorded.pop(0) if self.server.recorded else self.server.ids
        ids = list(whole[: body["max_tokens"]])
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
            "finish_reason": "stop" if len(ids) == len(whole) else "length",
            **self.server.spoil.get("choice", {}),
        }
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(choice["token_ids"] or ())}
        spoil = {key: value for key, value in self.server.spoil.items() if key != "choice"}
        self.answer(status, {"choices": [choice], "usage": usage, **spoil})

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        if status == 0:
            self.close_connection = True
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n" + data[:20])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if status == 429:
            self.send_header("retry-after", "3")
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@contextmanager
def connect(server: Server, waits: list[float] | None = None) -> Iterator[HttpEngine]:
    chosen = EndpointSettings(url=server.url)
    with closing(
        HttpEngine(chosen, server.renderer, sleep=([] if waits is None else waits).append)
    ) as sampler:
        yield sampler


def test_dropped_connections_and_429_are_waited_out(server: Server):
    waits: list[float] = []
    server.script = [0, 429, 500]
    with connect(server, waits) as sampler:
        assert sample_all(sampler, [REQUEST])[0].ids == server.ids
    assert waits == [0.5, 3.0, 2.0], "a server that names its wait is believed"
    assert sampler.description == {"name": "http", "url": server.url, "served": "tiny", "version": "0.99"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            {"usage": {"prompt_tokens": 4}},
            "counts 4 prompt_tokens where there are 3. It adds or drops tokens",
        ),
        ({"usage": {"completion_tokens": 2}}, "counts 2 completion_tokens where there are"),
        ({"choice": {"token_ids": None}}, "returned no token ids"),
        ({"choice": {"token_ids": []}}, "returned no token ids"),
        ({"choice": {"token_ids": ["<call>"]}}, "token id '<call>', which is no token id"),
        ({"choice": {"token_ids": [True]}}, "token id True"),
        ({"choice": {"logprobs": {"token_logprobs": [0.7] * 99}}}, "tokens with 99 log-probabilities"),
        ({"choices": []}, "answered without a choice"),
        ({"choices": None, "error": {"message": "no such model"}}, "no such model"),
    ],
)
def test_lies_are_named(server: Server, spoil: dict[str, Any], message: str):
    server.spoil = spoil
    with connect(server) as sampler, pytest.raises(SamplerError, match=message):
        sample_all(sampler, [REQUEST])


@pytest.mark.parametrize("logp", [0.7, "x", float("-inf"), float("nan"), None])
def test_numbers_that_are_no_log_probability_are_refused(server: Server, logp: Any):
    logps = [-0.1] * (len(server.ids) - 1) + [logp]
    server.spoil = {"choice": {"logprobs": {"token_logprobs": logps}}}
    with connect(server) as sampler:
        with pytest.raises(SamplerError, match="log-probability"):
            sample_all(sampler, [REQUEST])
        server.spoil = {"choice": {"logprobs": {"token_logprobs": [1e-6] * len(server.ids)}}}
        assert set(sample_all(sampler, [REQUEST])[0].logps) == {0.0}, "an engine's rounding"


@pytest.mark.parametrize("is_damaged", [False, True])
def test_experts_that_a_server_tells_come_with_the_sample(server: Server, is_damaged: bool):
    """As vLLM sends them: a .npy file in base64, a row for every token that was read."""
    chosen = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    np.save(file := io.BytesIO(), chosen)
    text = base64.b64encode(file.getvalue()).decode()
    server.spoil = {"choice": {"routed_experts": text[:-40] if is_damaged else text}}
    with connect(server) as engine:
        (sample,) = sample_all(engine, [REQUEST])
    assert (sample.experts is None) == is_damaged
    if sample.experts is not None:
        assert sample.experts.start == 0 and (expert_log.read(sample.experts) == chosen).all()


@pytest.mark.parametrize("models", [[], {"data": None}, {"data": [{}]}, {"object": "error"}])
def test_a_server_that_lists_no_models_is_named(server: Server, models: Any):
    server.models = models
    said = r"does not list models|did not answer with a JSON object"
    with pytest.raises(SamplerError, match=said), connect(server):
        pass


def test_an_address_without_a_scheme_is_a_mistake():
    with pytest.raises(RecipeError, match=r"url = 'localhost:8000': give an address with http"):
        read(EndpointSettings, None, ["url=localhost:8000"])


@pytest.fixture
def two_tasks(tiny_task: Task, tmp_path: Path) -> Path:
    """The same work asked for in other words: two tasks."""
    for name in ("one", "two"):
        folder.write(
            dataclasses.replace(tiny_task, instruction=f"{tiny_task.instruction}\nThis is {name}.\n"),
            tmp_path / "tasks" / name,
            workspace=tiny_task.folder / "environment" / "workspace",
            tests=folder.protected_files(tiny_task),
            gold={path: (text or "").encode() for path, text in folder.gold_patch(tiny_task).files.items()},
        )
    return tmp_path / "tasks"


def test_an_evaluation_goes_on_where_its_server_failed(
    server: Server, two_tasks: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Waves of one task: the first is answered, then the server is gone. Exit code 3, then --resume."""
    monkeypatch.chdir(tmp_path)
    server.script, server.otherwise = [200, 200, 200], 400  # the first is the question what it speaks
    runner = CliRunner()
    options = ["--endpoint", server.url, "--model", str(tiny_model_dir), "--attempts", "2", "--name", "it"]
    settings = ["rollout.max_in_flight=2", "codec=plain"]
    result = runner.invoke(app, ["eval", str(two_tasks), *options, *settings])
    assert result.exit_code == 3, result.output
    assert "SamplerError" in result.stderr and "resume with: woodshed eval --resume runs/it" in result.stderr
    run = RunDir.open(tmp_path / "runs" / "it")
    assert len(run.read("rollouts", Rollout)) == 2, "the finished wave is kept"
    server.otherwise = 200
    result = runner.invoke(app, ["eval", "--resume", "runs/it"])
    assert result.exit_code == 0, result.output
    rollouts = [rollout for _, _, rollout in run.read("rollouts", Rollout)]
    assert [(r.task_name, r.attempt) for r in rollouts] == [("one", 0), ("one", 1), ("two", 0), ("two", 1)]
    assert server.completions == 4 + 2, "nothing was made twice, and asked once a start what it speaks"
    books = ledger.from_run(run)
    assert books.total.decode_tokens == 4 * len(server.ids) and books.served == "tiny"
    assert "no price for served model 'tiny'" in result.stderr
    assert run.manifest["score"]["engine"]["version"] == "0.99" and run.manifest["prices"]["date"]
    assert "pass@2" in result.stdout and "tasks 2, attempts 4, of these void 0" in result.stdout


def test_a_chat_endpoint_is_evaluated_and_not_trained_on(
    server: Server, two_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    server.refused_limit = "max_tokens"
    options = ["--endpoint", server.url, "--model", "tiny", "--name", "chat", "engine.kind=chat", "limit=1"]
    result = CliRunner().invoke(app, ["eval", str(two_tasks), *options])
    assert result.exit_code == 0, result.output
    ((_, _, rollout),) = RunDir.open(tmp_path / "runs" / "chat").read("rollouts", Rollout)
    assert (rollout.ended, rollout.turns[0].text) == ("finished", "<call>finish</call>")
    assert set(server.bodies[-1]) == {"model", "messages", "max_completion_tokens"}
    assert [message["role"] for message in server.bodies[-1]["messages"]] == ["system", "user"]
    assert "<call>shell command</call>" in server.bodies[-1]["messages"][0]["content"]
    with pytest.raises(RecipeError, match="returns text: no token ids and no log-prob"):
        refuse(read(Recipe, RECIPE, ["engine.kind=chat", f"engine.servers=[{{url='{server.url}'}}]"]))


def test_a_text_server_is_refused_with_the_way_out_before_a_run_is_made(
    server: Server, two_tasks: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    server.spoil = {"choice": {"token_ids": None}}
    options = ["--endpoint", server.url, "--model", str(tiny_model_dir), "codec=plain"]
    result = CliRunner().invoke(app, ["eval", str(two_tasks), *options])
    assert result.exit_code == 2 and "speaks text only" in result.stderr, result.output
    assert "engine.kind=chat" in result.stderr and not Path("runs").exists()


def test_a_chat_endpoint_reads_the_conversation_as_it_was(server: Server):
    words = TextRenderer("json")
    with pytest.raises(RecipeError, match="takes text only; take plain or json"):
        TextRenderer("hermes")
    said, results = ["Look. é世 <|im_end|>", ""], ["a\n", "no call"]
    ids = [*words.start("s", "u", ()).ids]
    for number, (text, result) in enumerate(zip(said, results, strict=True)):
        sampled = words.encode_message(text)[: -1 if number else None]
        assert words.decode(sampled) == text
        context = words.extend(sampled, "stop" if sampled else "length", [Observation("", result)], ())
        ids += [*sampled, *context.ids]
    conversation = words.messages(ids)
    assert [(m["role"], m["content"]) for m in conversation[1:]] == [
        *[("user", "u"), ("assistant", said[0]), ("user", "a\n"), ("assistant", ""), ("user", "no call")]
    ]
    hinted = [*ids[:-1], *words.hint("Mind."), ids[-1]]
    assert words.messages(hinted)[-1] == {"role": "system", "content": "Mind."}
    server.said["choices"][0] |= {"finish_reason": "length"}
    with closing(ChatEngine(EndpointSettings(url=server.url), words)) as engine:  # type: ignore[arg-type]
        cut = sample_all(engine, [SampleRequest(tuple(ids), 64, 0)])[0]  # type: ignore[arg-type]
    assert (cut.finish_reason, words.decode(cut.ids)) == ("length", "<call>finish</call>")
    assert server.bodies[-1]["messages"] == conversation


def test_one_task_under_two_names_is_refused(two_tasks: Path, tmp_path: Path):
    import shutil

    shutil.copytree(two_tasks / "one", two_tasks / "three")
    result = CliRunner().invoke(app, ["eval", str(two_tasks), "--model", "none"])
    assert result.exit_code == 2 and "are the same task" in result.stderr and "count twice" in result.stderr


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_an_address_with_v1_is_the_same_address(server: Server, suffix: str):
    settings = EndpointSettings(url=server.url + suffix)
    assert settings.url == server.url
    with closing(HttpEngine(settings, server.renderer)) as sampler:
        assert sample_all(sampler, [REQUEST])
    waits: list[float] = []
    with pytest.raises(SamplerError, match=r"^http://127\.0\.0\.1:1/v1/models failed"):
        HttpEngine(EndpointSettings(url=f"http://127.0.0.1:1{suffix}"), server.renderer, sleep=waits.append)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("url", ["http://a..b", "http://host:99999999/v1", "http://[::1", "localhost:8000"])
def test_an_address_that_no_machine_can_have_is_refused(url: str):
    with pytest.raises(RecipeError, match=r"url = "):
        read(EndpointSettings, None, [f"url={json.dumps(url)}"])
    assert not doctor._endpoint(url).ok
