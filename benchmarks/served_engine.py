"""A vLLM server behind the client that training uses, for benchmarks beside vLLM alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from vllm_engine import Request, Written, write_adapter

from woodshed.engines import vllm
from woodshed.engines.engine import SampleRequest, SamplerSettings, sample_all
from woodshed.engines.http import HttpEngine, receiver_for
from woodshed.engines.servers import ServedModel, StartSettings, serving


class Unstopped(HttpEngine):
    """Messages of a length that is known before, as other engines of the benchmark write them."""

    def _body(self, *args: Any) -> dict[str, Any]:
        return super()._body(*args) | {"ignore_eos": True}


class NoStops:
    """What a client asks of a renderer: which ids end a message."""

    stop_ids: frozenset[int] = frozenset()


class Served:
    """A request of its own for each message. The model is a folder with weights."""

    def __init__(self, model: str, rank: int, scratch: Path) -> None:
        config = json.loads((Path(model) / "config.json").read_text())
        adapter = write_adapter(scratch / "adapter", config, rank) if rank else None
        arguments = ("--max-model-len=12288", "--max-num-seqs=512")
        settings = StartSettings("vllm", SamplerSettings(), (), arguments)
        served = ServedModel(Path(model), "bfloat16", rank, adapter=adapter)
        self._open = ExitStack()
        """Holds the server, which ends with this process at the latest."""
        endpoints = self._open.enter_context(serving(settings, served, scratch / "engines"))
        renderer: Any = NoStops()
        self.url = endpoints[0].url
        self.engine = Unstopped(endpoints[0], renderer, temperature=1.0, receiver=receiver_for(endpoints))
        self.vocabulary = min(int(config["vocab_size"]), 151_000)
        self.versions = f"vllm {vllm.find().version}"

    def write(self, asked: list[Request]) -> Written:
        samples = sample_all(
            self.engine, [SampleRequest(each.prompt_ids, each.max_tokens, each.seed) for each in asked]
        )
        assert all(len(sample.ids) == each.max_tokens for sample, each in zip(samples, asked, strict=True))
        return [(sample.ids, sample.logps) for sample in samples]

    def forget(self) -> None:
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=60).raise_for_status()

    def more(self, written: Sequence[Any]) -> dict[str, Any]:
        return {}
