"""Training through engines of other processes: weights travel as folders, and another model is refused first."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from scripted import renderer
from test_practice import recipe_of
from test_sampler import Handler, Server
from tiny_model import write_tiny_model

from woodshed import settings
from woodshed.engines import local
from woodshed.engines.create import EngineSettings, create
from woodshed.engines.engine import Sample, SampleRequest, WeightUpdate
from woodshed.engines.local import LocalEngine
from woodshed.engines.router import Router
from woodshed.engines.scripted import ScriptedEngine
from woodshed.learning.policy import add_adapter
from woodshed.records import RecipeError, Rollout, SamplerError, Task
from woodshed.runs.folder import RunDir
from woodshed.tokens.renderer import create_renderer
from woodshed.train import train


class LoadsAdapters(Handler):
    """A server with weights of its own, which change only by the folders that it is told to load."""

    def do_POST(self) -> None:  # noqa: N802 (named by the library)
        if self.path == "/v1/load_lora_adapter":
            from peft import set_peft_model_state_dict
            from safetensors.torch import load_file

            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with self.server.lock:
                self.server.bodies.append(body | {"path": self.path})
                behind = self.server.behind
                weights = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
                set_peft_model_state_dict(behind.model, weights)
                behind.update_weights(WeightUpdate("shared"), 0)
            self.answer(200, "Success: it is loaded.")
        else:
            super().do_POST()


def serve(model: Path, seed: int = 0) -> Server:
    loaded = local.load(str(model))
    engine = LocalEngine(
        add_adapter(loaded.model, 4), create_renderer(loaded.tokenizer, codec="plain", model_dir=model)
    )
    server = Server(engine)
    server.RequestHandlerClass = LoadsAdapters
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def servers(tiny_model_dir: Path) -> Iterator[list[Server]]:
    opened = [serve(tiny_model_dir), serve(tiny_model_dir)]
    yield opened
    for server in opened:
        server.shutdown()
        server.server_close()
        server.behind.close()


def trained(task: Task, root: Path, model: Path, *servers: Server, steps: int = 2) -> RunDir:
    recipe = recipe_of(
        task,
        root,
        policy={"model": str(model), "lora_rank": 4, "codec": "plain"},
        rl={"steps": steps, "tasks_per_step": 1},
        curriculum={"repeats": True},
        engine=served_by(*servers),
    )
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    train(recipe, run, lambda _done, _total, _text: None)
    return run


def served_by(*servers: Server) -> dict[str, Any]:
    urls = [{"url": f"http://127.0.0.1:{server.server_port}"} for server in servers]
    return {"kind": "http", "servers": urls}


def test_two_servers_train_a_policy_and_compute_as_the_trainer_does(
    servers: list[Server], tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
):
    run = trained(tiny_task, tmp_path, tiny_model_dir, *servers)
    steps = [line for phase, _, line in run.read("metrics") if phase == "train"]
    assert len(steps) == 2 and all(line["logp_gap_mean"] < 1e-4 for line in steps)
    for phase, step, rollout in run.read("rollouts", Rollout):
        assert phase != "train" or {v for turn in rollout.turns for v, _ in turn.versions} == {step}
    for server in servers:
        loaded = [body["lora_name"] for body in server.bodies if body["path"] == "/v1/load_lora_adapter"]
        written = {body["model"] for body in server.bodies if body["path"] == "/v1/completions"}
        assert len(set(loaded)) == len(loaded) > 2 and written <= set(loaded) and written
    assert len(list((run.path / "weights").iterdir())) <= 2


def test_a_server_of_another_model_is_refused_before_any_attempt(
    tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
):
    server = serve(write_tiny_model(tmp_path / "other", seed=1))
    with pytest.raises(SamplerError, match=r"differ by .* nats a token.* Serve "):
        trained(tiny_task, tmp_path, tiny_model_dir, server)
    assert sum(body["path"] == "/v1/completions" for body in server.bodies) == 1
    server.shutdown()
    server.server_close()


def test_a_server_without_token_ids_is_refused_before_any_attempt(
    servers: list[Server], tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
):
    servers[0].spoil = {"token_ids": None}
    with pytest.raises(SamplerError, match="returned no token ids"):
        trained(tiny_task, tmp_path, tiny_model_dir, servers[0])
    assert sum(body["path"] == "/v1/completions" for body in servers[0].bodies) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("kind='http'", "needs servers; add"),
        ("servers=[{url='http://127.0.0.1:1'}]", "uses no servers"),
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


def test_an_engine_of_ones_own_must_be_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_engine.py").write_text("def half(settings, renderer, model):\n    return object()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=r"engine.kind = 'own_engine:half' opened a object, which has no"):
        create(EngineSettings(kind="own_engine:half"), renderer())
