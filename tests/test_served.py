"""Training through engines of other processes: weights travel as folders, and another model is refused first."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_server import serving
from scripted import renderer
from starlette.requests import Request
from starlette.responses import Response
from test_practice import recipe_of
from tiny_model import write_tiny_model

from woodshed import agent, parts, settings
from woodshed.cli.app import open_engine
from woodshed.cli.train import run_recipe
from woodshed.engines.create import EngineSettings, create
from woodshed.engines.engine import Sample, SampleRequest, WeightUpdate
from woodshed.engines.guard import members
from woodshed.engines.local.server import FolderEngine, LocalServer
from woodshed.engines.router import MOST_AHEAD, Router
from woodshed.engines.scripted import ScriptedEngine
from woodshed.evals.suite import SuiteSettings
from woodshed.experience import Collector, RolloutSettings
from woodshed.experience.annotations import critic_of
from woodshed.records import RecipeError, Rollout, SamplerError, Task
from woodshed.runs.folder import RunDir
from woodshed.settings import validate
from woodshed.stages.session import Session


class Witness:
    """A server's application that keeps the requests, and can be told to misbehave."""

    def __init__(self, server: LocalServer) -> None:
        self.behind: Any = server.app
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.failures: list[int] = []
        self.spoil: dict[str, Any] = {}
        """Merged into the choice of every answer that is no canary."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = await request.body()
        asked = json.loads(body) if body else {}
        self.bodies.append(asked | {"path": scope["path"]})
        if scope["method"] == "POST" and self.failures:
            await Response("{}", self.failures.pop())(scope, receive, send)
            return
        told = iter([{"type": "http.request", "body": body, "more_body": False}])
        spoil = self.spoil if scope["path"] == "/v1/completions" and "prompt_logprobs" not in asked else {}

        async def again() -> Any:
            return next(told, None) or await receive()

        async def spoiled(message: Any) -> None:
            if spoil and message["type"] == "http.response.start":
                message["headers"] = [(k, v) for k, v in message["headers"] if k != b"content-length"]
            if spoil and message["type"] == "http.response.body":
                answer = json.loads(message["body"])
                answer["choices"][0] |= spoil
                message["body"] = json.dumps(answer).encode()
            await send(message)

        await self.behind(scope, again, spoiled)

    def paths(self) -> list[str]:
        """Of requests that sample nothing."""
        return [body["path"] for body in self.bodies if body["path"] not in ("/v1/completions", "/v1/models")]

    def sampled(self) -> list[dict[str, Any]]:
        """Requests for messages."""
        return [b for b in self.bodies if b["path"] == "/v1/completions" and "prompt_logprobs" not in b]


@contextmanager
def watched(model: Path, deaf: str | None = None) -> Iterator[Witness]:
    """A server of a model.

    Args:
        deaf: part of the names of weights that it keeps as they are, and says nothing.
    """
    witnesses: list[Witness] = []

    def watch(server: LocalServer) -> None:
        witnesses.append(Witness(server))
        server.app = witnesses[0]
        if deaf is not None:
            deafen(server.engines["policy"], deaf)

    with serving(model, prepare=watch) as (url, _):
        witnesses[0].url = url
        yield witnesses[0]


def deafen(engine: FolderEngine, part: str) -> None:
    hear = engine.reload

    def reload(folder: Path) -> None:
        kept = {name: value.clone() for name, value in engine.model.state_dict().items() if part in name}
        hear(folder)
        engine.model.load_state_dict(kept, strict=False)

    engine.reload = reload


@pytest.fixture
def servers(tiny_model_dir: Path) -> Iterator[list[Witness]]:
    with watched(tiny_model_dir) as first, watched(tiny_model_dir) as second:
        yield [first, second]


def trained(
    task: Task,
    root: Path,
    model: Path,
    *servers: Witness,
    steps: int = 2,
    engine: Any = None,
    lora_rank: int = 4,
) -> RunDir:
    recipe = recipe_of(
        task,
        root,
        policy={"model": str(model), "lora_rank": lora_rank, "codec": "plain"},
        rl={"steps": steps, "tasks_per_step": 1},
        curriculum={"repeats": True},
        engine=engine or served_by(*servers),
    )
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    run_recipe(recipe, run, lambda _done, _total, _text: None)
    return run


def served_by(*servers: Witness) -> dict[str, Any]:
    return {"kind": "http", "servers": [{"url": server.url} for server in servers]}


def test_two_servers_train_a_policy_and_compute_as_the_trainer_does(
    servers: list[Witness], tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
):
    run = trained(tiny_task, tmp_path, tiny_model_dir, *servers)
    steps = [line for phase, _, line in run.read("metrics") if phase == "train"]
    assert len(steps) == 2 and all(line["logp_gap_mean"] < 1e-4 for line in steps)
    for phase, step, rollout in run.read("rollouts", Rollout):
        assert phase != "train" or {v for turn in rollout.turns for v, _ in turn.versions} == {step}
    for server in servers:
        loaded = [body["lora_name"] for body in server.bodies if body["path"] == "/v1/load_lora_adapter"]
        written = {body["model"] for body in server.sampled()}
        assert len(set(loaded)) == len(loaded) > 2 and written <= set(loaded)
    assert any(server.sampled() for server in servers), "the attempts at one task keep to one server"
    assert len(list((run.path / "weights").glob("v*"))) <= 2


def test_whole_weights_are_trained_through_a_server_that_takes_them(
    tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
):
    with watched(tiny_model_dir) as server:
        run = trained(tiny_task, tmp_path, tiny_model_dir, server, lora_rank=0)
    steps = [line for phase, _, line in run.read("metrics") if phase == "train"]
    assert len(steps) == 2 and all(line["logp_gap_mean"] < 1e-4 for line in steps)
    order = server.paths()[1:]  # after the question for the version
    assert order == ["/pause", "/collective_rpc", "/resume"] * (len(order) // 3) and len(order) >= 3 * 4


@pytest.mark.slow
def test_a_run_starts_the_local_engine_in_a_process_of_its_own(
    tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
):
    for rank in (4, 0):
        run = trained(
            tiny_task, tmp_path / str(rank), tiny_model_dir, engine={"kind": "process"}, lora_rank=rank
        )
        steps = [line for phase, _, line in run.read("metrics") if phase == "train"]
        assert len(steps) == 2 and all(line["logp_gap_mean"] < 1e-4 for line in steps)
        state = json.loads((run.path / "engines" / "s0.json").read_text())
        assert state["state"] == "ended" and not members(str((run.path / "engines" / "s0.json").resolve()))


@pytest.mark.parametrize("deaf", ["lm_head", ""])
def test_a_server_that_keeps_old_weights_and_says_nothing_is_refused(
    deaf: str, tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
):
    said = r"took new weights .* twice, and is .* goes on with old ones.*tie_word_embedd"
    with watched(tiny_model_dir, deaf) as server, pytest.raises(SamplerError, match=said):
        trained(tiny_task, tmp_path, tiny_model_dir, server, lora_rank=0)
    assert server.paths().count("/collective_rpc") == 2 and not server.sampled()


@pytest.mark.parametrize(
    ("lora_rank", "switch"), [(4, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"), (0, "VLLM_SERVER_DEV_MODE=1")]
)
def test_a_server_that_takes_no_weights_says_how_it_is_started(
    lora_rank: int, switch: str, tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
):
    with watched(tiny_model_dir) as server, pytest.raises(SamplerError, match=rf"status 404.*{switch}"):
        server.failures = [404]
        trained(tiny_task, tmp_path, tiny_model_dir, server, lora_rank=lora_rank)


def test_a_server_of_another_model_is_refused_before_any_attempt(
    tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
):
    other = write_tiny_model(tmp_path / "other", seed=1)
    with (
        watched(other) as server,
        pytest.raises(SamplerError, match=r"nats a token .* of another model. Serve "),
    ):
        trained(tiny_task, tmp_path, tiny_model_dir, server)
    assert not server.sampled()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("kind='http'", "needs servers; add"),
        ("servers=[{url='http://127.0.0.1:1'}]", "uses no servers"),
        ("gpus=[0]", "starts no servers; gpus and arguments are for vllm and process"),
        ("kind='htp'", "no engine 'htp'; did you mean 'http'"),
    ],
)
def test_contradictions_are_refused_when_settings_are_read(given: str, message: str):
    with pytest.raises(RecipeError, match=message):
        settings.read(EngineSettings, None, [given])


def test_one_of_several_servers_is_changed_by_its_number():
    servers = "servers=[{url='http://a'}, {url='http://b'}]"
    chosen = settings.read(EngineSettings, None, ["kind=http", servers, "servers.1.model=big"])
    assert [server.model for server in chosen.servers] == ["", "big"]
    for wrong in ("servers.2.model=big", "servers.model=big"):
        with pytest.raises(RecipeError, match="name one of 2 tables by its number"):
            settings.read(EngineSettings, None, ["kind=http", servers, wrong])


class Held(ScriptedEngine):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(renderer(), [])
        self.futures: list[Future[Sample]] = []
        self.closed = False

    def submit(self, request: SampleRequest) -> Future[Sample]:
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        self.closed = True


def test_a_router_gives_to_the_engine_that_has_the_fewest():
    engines = [Held(), Held(), Held()]
    with closing(Router(engines)) as router:
        request = SampleRequest((1, 2), 4, 0)
        router.submit_all([request] * 4)
        assert [len(engine.futures) for engine in engines] == [2, 1, 1]
        engines[2].futures[0].set_result(Sample((5,), (0.0,), "stop", ((0, 1),)))
        engines[0].futures[0].cancel()
        assert router.in_flight == [1, 1, 0]
        router.submit(request)
        assert [len(engine.futures) for engine in engines] == [2, 1, 2]
        router.update_weights(WeightUpdate("shared"), 3)
        assert {engine.policy_version for engine in engines} == {3} == {router.policy_version}
    assert all(engine.closed for engine in engines)


def test_a_group_keeps_to_the_engine_whose_cache_knows_it_until_that_is_much_busier():
    engines = [Held(), Held()]
    with closing(Router(engines)) as router:
        for group in "aabaab":
            router.submit(SampleRequest((1, 2), 4, 0, group))
        assert [len(engine.futures) for engine in engines] == [4, 2]
        router.submit_all([SampleRequest((1, 2), 4, 0, "a")] * 8)
        assert router.in_flight == [2 + MOST_AHEAD + 1, 3], "the last one moved"


class Unwilling(Held):
    """Takes no weights as long as it is told so."""

    refuses = True

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        if self.refuses:
            raise SamplerError("no")
        super().update_weights(update, version)


def test_an_engine_without_the_newest_weights_gets_no_messages():
    behind, other = Unwilling(), Held()
    with closing(Router([behind, other])) as router:
        router.update_weights(WeightUpdate("shared"), 1)
        router.submit_all([SampleRequest((1, 2), 4, 0)] * 3)
        assert (router.policy_version, router.in_flight) == (1, [0, 3])
        behind.refuses = False
        router.update_weights(WeightUpdate("shared"), 2)
        router.submit(SampleRequest((1, 2), 4, 0))
        assert (router.policy_version, router.in_flight) == (2, [1, 3])
    with closing(Router([Unwilling(), Unwilling()])) as router, pytest.raises(SamplerError, match="no"):
        router.update_weights(WeightUpdate("shared"), 1)


def test_an_engine_of_ones_own_must_be_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_engine.py").write_text("def half(settings, renderer, model):\n    return object()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=r"engine.kind = 'own_engine:half' opened a object, which has no"):
        create(EngineSettings(kind="own_engine:half"), renderer())


OWN = """
from concurrent.futures import Future
from dataclasses import replace
from woodshed.engines.engine import sample_all
from woodshed.engines.local import LocalEngine

class Spoiled(LocalEngine):
    spoil = dict(ids=(), logps=(), versions=())
    def submit_all(self, requests):
        futures = []
        for sample in [future.result() for future in super().submit_all(requests)]:
            futures.append(Future())
            futures[-1].set_result(replace(sample, **self.spoil) if self.spoil else sample.ids)
        return futures

class Worded(Spoiled):
    spoil = None

class Separate(Spoiled):
    takes = "folder"
    def update_weights(self, update, version):
        assert update.folder.is_dir()

def spoiled(settings, renderer, model):
    return Spoiled(model, renderer, settings)

def worded(settings, renderer, model):
    return Worded(model, renderer, settings)

def separate(settings, renderer, model):
    return Separate(model, renderer, settings)
"""


@pytest.fixture
def own_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_engines.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    parts._imported.cache_clear()
    yield "own_engines"
    sys.modules.pop("own_engines", None)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("http", "returned no token ids"),
        ("router", "returned no token ids"),
        ("own_engines:spoiled", "returned no token ids"),
        ("own_engines:separate", "returned no token ids"),
        ("own_engines:worded", "returned a tuple in place of a Sample"),
    ],
)
def test_an_engine_without_token_ids_is_refused_before_any_attempt(
    kind: str,
    message: str,
    servers: list[Witness],
    own_engines: str,
    tiny_task: Task,
    tiny_model_dir: Path,
    tmp_path: Path,
):
    for server in servers:
        server.spoil = {"token_ids": None}
    asked = servers[: {"http": 1, "router": 2}.get(kind, 0)]
    with pytest.raises(SamplerError, match=message):
        trained(tiny_task, tmp_path, tiny_model_dir, *asked, engine=None if asked else {"kind": kind})
    assert not list(tmp_path.rglob("rollouts.jsonl"))
    assert sum(len(server.sampled()) for server in asked) == len(asked[:1])


def test_what_an_engine_returns_in_mid_run_is_checked_too(tiny_task: Task):
    """The first message may be right and a later one not."""
    engine = ScriptedEngine(renderer(), ["<call>finish</call>"])
    right = engine.submit(SampleRequest((1, 2), 64, 0)).result()
    for wrong, message in (
        ({"ids": ()}, "no token ids"),
        ({"ids": ("a",) * len(right.ids)}, "'a', which is no token id"),
        ({"logps": ()}, "with 0 log-probabilities"),
        ({"logps": (float("nan"),) * len(right.ids)}, "log-probability nan"),
        ({"versions": ()}, r"with versions \(\)"),
        ({"finish_reason": "length"}, "finished .* with 'length'"),
    ):
        future = answered(replace(right, **wrong))
        engine.submit_all = lambda _requests, f=future: [f]  # type: ignore[method-assign]
        with pytest.raises(SamplerError, match=message):
            agent.run(tiny_task, engine, agent.AgentSettings())
        with pytest.raises(SamplerError, match=message):
            Collector(engine, RolloutSettings(attempts=1), agent.AgentSettings()).collect([tiny_task])


def answered(sample: Sample) -> Future[Sample]:
    future: Future[Sample] = Future()
    future.set_result(sample)
    return future


def test_the_critics_own_engine_is_closed(servers: list[Witness], tiny_task: Task, tiny_model_dir: Path):
    url = {"url": servers[0].url}
    recipe = recipe_of(tiny_task, tiny_model_dir, critic={"endpoint": url, "model": str(tiny_model_dir)})
    policys: Any = Held()
    critic = critic_of(recipe.critic, policys)
    assert critic is not policys
    nothing: Any = None
    Session(recipe, nothing, nothing, policys, nothing, critic, nothing).close()
    assert policys.closed
    with pytest.raises(RuntimeError):
        critic.submit(SampleRequest((1, 2), 4, 0))


@pytest.mark.parametrize(("parameters", "is_given"), [("model", True), ("model=None", False)])
def test_an_engine_of_ones_own_is_given_a_model_in_an_evaluation_unless_it_can_do_without(
    parameters: str, is_given: bool, own_engines: str, tiny_model_dir: Path, tmp_path: Path
):
    (tmp_path / "own_engines.py").write_text(
        "from woodshed.engines.scripted import ScriptedEngine\n"
        f"def make(settings, renderer, {parameters}):\n"
        "    engine = ScriptedEngine(renderer, [])\n"
        "    engine.model = model\n"
        "    return engine\n"
    )
    chosen = validate(
        SuiteSettings,
        {"name": "e", "tasks": ["t"], "model": str(tiny_model_dir), "engine": {"kind": "own_engines:make"}},
    )
    with closing(open_engine(chosen)) as engine:
        assert (engine.model is not None) == is_given  # type: ignore[attr-defined]
