"""A local model served as vLLM serves one: the same tokens, messages that are cut, weights and adapters by folders."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from local_server import serving
from safetensors.torch import save_file
from tiny_model import write_tiny_model

from woodshed.engines import local
from woodshed.engines.engine import Sample, SampleRequest, sample_all
from woodshed.engines.local import LocalEngine
from woodshed.engines.local.server import LocalServer
from woodshed.learning.policy import add_adapter
from woodshed.tokens.renderer import create_renderer

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def served(tiny_model_dir: Path) -> Iterator[tuple[httpx.Client, LocalServer]]:
    with serving(tiny_model_dir) as (url, server), httpx.Client(base_url=url, timeout=60) as client:
        yield client, server


def ask(client: httpx.Client, seed: int = 0, max_tokens: int = 24, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "seed": seed, "stop_token_ids": [2], **more}
    response = client.post("/v1/completions", json=body)
    assert response.is_success, response.text
    return response.json()["choices"][0]


def call(client: httpx.Client, path: str, **body: Any) -> int:
    return client.post(path, json=body).status_code


def sampled(folder: Path, seed: int, adapter: Path | None = None, max_tokens: int = 24) -> Sample:
    """The message of an engine in this process."""
    loaded = local.load(str(folder), adapter=adapter)
    with closing(LocalEngine(loaded.model, create_renderer(loaded.tokenizer, codec="plain"))) as engine:
        return sample_all(engine, [SampleRequest(tuple(PROMPT), max_tokens, seed)])[0]


def same(choice: dict[str, Any], sample: Sample) -> bool:
    logps = tuple(choice["logprobs"]["token_logprobs"])
    return (tuple(choice["token_ids"]), logps) == (sample.ids, sample.logps)


def published(model: Path, folder: Path) -> Path:
    """The weights of a model as they are published: its output layer written out."""
    state = local.load(str(model)).model.state_dict()
    folder.mkdir()
    save_file({name: value.clone() for name, value in state.items()}, folder / "model.safetensors")
    return folder


def adapter(model: Path, folder: Path, seed: int) -> Path:
    adapted = add_adapter(local.load(str(model)).model, 4)
    torch.manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(folder)
    return folder


def test_the_same_tokens_as_in_this_process(served: tuple[httpx.Client, LocalServer], tiny_model_dir: Path):
    client, _ = served
    models = client.get("/v1/models").json()["data"]
    assert models == [{"id": "policy", "max_model_len": 4096}]
    for seed in range(3):
        assert same(ask(client, seed), sampled(tiny_model_dir, seed))
    canary = ask(client, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    model = local.load(str(tiny_model_dir)).model
    logps = model(torch.tensor([PROMPT])).logits[0].detach().log_softmax(-1)
    expected = [float(logps[i, token]) for i, token in enumerate(PROMPT[1:])]
    assert canary[0] is None
    found = [told[str(token)]["logprob"] for told, token in zip(canary[1:], PROMPT[1:], strict=True)]
    assert found == pytest.approx(expected, abs=1e-5)
    refused = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "temperature": 0.5})
    assert refused.status_code == 400 and "temperature 1, not 0.5" in refused.text


def test_a_pause_cuts_messages_and_holds_later_ones(served: tuple[httpx.Client, LocalServer]):
    client, server = served
    answers: dict[str, dict[str, Any]] = {}

    def asking(name: str, **more: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.update({name: ask(client, **more)}))
        thread.start()
        return thread

    long = asking("long", max_tokens=4000, stop_token_ids=[9999])
    while not any(row.ids for row in server.engines["policy"].scheduler._running):
        time.sleep(0.002)
    assert client.post("/pause?mode=keep").status_code == 400
    assert client.post("/pause?mode=abort&clear_cache=true").is_success
    long.join()
    assert answers["long"]["finish_reason"] == "abort" and 0 < len(answers["long"]["token_ids"]) < 4000
    held = asking("held", max_tokens=2)
    held.join(0.1)
    assert held.is_alive() and client.get("/is_paused").json() == {"is_paused": True}
    assert client.post("/resume").is_success
    held.join()
    assert len(answers["held"]["token_ids"]) == 2


def test_weights_come_from_folders_and_a_wrong_folder_changes_nothing(tiny_model_dir: Path, tmp_path: Path):
    other = write_tiny_model(tmp_path / "other", seed=1)
    whole = published(other, tmp_path / "whole")
    with serving(tiny_model_dir) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        before = sampled(tiny_model_dir, 0)
        for wrong in (tmp_path / "absent", adapter(tiny_model_dir, tmp_path / "adapter", 0)):
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(wrong)}}
            assert call(client, "/collective_rpc", **rpc) == 400
        assert call(client, "/collective_rpc", method="shutdown") == 400
        assert same(ask(client), before)
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(whole)}}
        assert call(client, "/collective_rpc", **rpc) == 200
        assert same(ask(client), sampled(other, 0))


def test_messages_of_several_adapters_at_once(tiny_model_dir: Path, tmp_path: Path):
    folders = {name: adapter(tiny_model_dir, tmp_path / name, seed) for seed, name in enumerate(("a", "b"))}
    with serving(tiny_model_dir) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        for name, folder in folders.items():
            assert call(client, "/v1/load_lora_adapter", lora_name=name, lora_path=str(folder)) == 200
        assert call(client, "/v1/load_lora_adapter", lora_name="a", lora_path=str(folders["b"])) == 400
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["policy", "a", "b"]
        answers: dict[str, dict[str, Any]] = {}
        threads = [
            threading.Thread(target=lambda n=name: answers.update({n: ask(client, model=n)}))
            for name in ("policy", *folders)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert same(answers["policy"], sampled(tiny_model_dir, 0))
        assert all(
            same(answers[name], sampled(tiny_model_dir, 0, folder)) for name, folder in folders.items()
        )
        assert call(client, "/v1/unload_lora_adapter", lora_name="a") == 200
        assert call(client, "/v1/completions", model="a", prompt=PROMPT, max_tokens=1) == 404
