"""Tokens a second of the local sampler beside vLLM's offline engine, on one GPU, over several loads.

    python benchmarks/generation.py                                             toy size, our side, for any machine
    python benchmarks/generation.py --models DIR_OR_SPEC,7b --adapters 0,16 --sides woodshed,vllm \
        --vllm-python /tmp/vllm/bin/python                                      the card's table

A model is a folder or a specification, or the name of a shape with random weights ("0.5b", "7b": speed does not depend
on them). Loads: 16, 128 and 512 rows of 512 + 256 tokens, half of the prompt common; 16 rows with prompts of 8,192;
and an agent's, 128 conversations of five turns that grow by what the tools say, 16 prompts with eight attempts each.
All messages have a length that is fixed beforehand, and both sides return the log-prob of every token under the
distribution it was drawn from. vLLM as its users run it for training: bfloat16, prefix cache, CUDA graphs, token ids in
and out, flat log-probs, no detokenising (`vllm_engine.py`). The side `served` is a vLLM server behind the client that
training uses (`served_engine.py`), for a folder with weights, and is to be at least 0.95 times as fast as vLLM alone at
an agent's load. Each side, model and adapter is a process of its own.

Rows: seconds of the whole call, and tokens a second of decoding alone (the whole less the same call with one token), as
least, median and most of `--repeats` after a warm-up; for our side the largest difference to the trainer's log-probs
and how many differ at all. Each row is written as it is measured and not measured twice.

Bars (one H100 or H200): 20,000 tokens a second at 128 rows of the 0.5B; log-probs equal to the trainer's.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kept_rows import Rows, spread
from vllm_engine import CONTEXT, SHAPES, VLLM, Request, Written

EXPECTED = {
    "woodshed, 0.5b": {"16": 6100, "128": 36_600, "512": 69_200, "16 long": 3400, "agent": 10_200},
    "woodshed, 0.5b, LoRA 16": {"16": 3500, "128": 23_100, "512": 50_700, "agent": 6700},
    "vllm, 0.5b": {"16": 7200, "128": 25_400, "512": 33_200, "16 long": 6400, "agent": 13_600},
    "woodshed, 7b": {"16": 2000, "128": 12_300, "512": 16_200, "16 long": 1300, "agent": 3200},
    "vllm, 7b": {"16": 3100, "128": 15_100, "512": 19_600, "16 long": 2600, "agent": 5000},
    "vllm with LoRA 16": "a fifth slower than without",
}
"""Tokens a second, written down before the run: decoding alone; of the whole for the agent's load."""


@dataclass(frozen=True)
class Load:
    """Rounds of requests; `turns` above 1 is an agent's."""

    rows: int
    prompt: int
    new: int
    turns: int = 1
    group: int = 8
    observation: int = 300

    def tokens(self) -> int:
        return sum(sum(lengths) for lengths in self.lengths())

    def lengths(self) -> list[list[int]]:
        """Of each row's message, by turn: all alike in one turn, else spread as messages are."""
        if self.turns == 1:
            return [[self.new] * self.rows]
        rng = random.Random(1)
        return [
            [min(self.new, max(4, int(rng.lognormvariate(4.0, 0.7)))) for _ in range(self.rows)]
            for _ in range(self.turns)
        ]

    def prompts(self, vocabulary: int) -> list[tuple[int, ...]]:
        """With a common first half; an agent's attempts at the same task have the same prompt."""
        rng = random.Random(0)

        def draw(count: int) -> tuple[int, ...]:
            return tuple(rng.randrange(10, vocabulary) for _ in range(count))

        head, own = draw(self.prompt // 2), self.prompt - self.prompt // 2
        if self.turns == 1:
            return [head + draw(own) for _ in range(self.rows)]
        tasks = [head + draw(own) for _ in range(max(1, self.rows // self.group))]
        return [tasks[row % len(tasks)] for row in range(self.rows)]


LOADS = {
    "16": Load(16, 512, 256),
    "128": Load(128, 512, 256),
    "512": Load(512, 512, 256),
    "16 long": Load(16, 8192, 256),
    "agent": Load(128, 1300, 192, turns=5),
}
TOY_LOADS = {
    "16": Load(4, 16, 6),
    "16 long": Load(2, 64, 6),
    "agent": Load(4, 32, 8, turns=3, group=2, observation=8),
}


def main() -> None:
    options = _options()
    if options.side:
        measure_side(options, rows_of(options))
        return
    rows_of(options).write(expected=EXPECTED)
    for model in options.models.split(","):
        for rank in options.adapters.split(","):
            for side in options.sides.split(","):
                rows = rows_of(options)
                if any(not rows.has(**key(side, model, rank, load)) for load in options.loads.split(",")):
                    call(side, model, rank, options)


def rows_of(options: argparse.Namespace) -> Rows:
    """The file's rows, as far as they were measured."""
    made = Rows(
        options.out,
        {},
        key=("side", "model", "lora_rank", "load"),
        commit=options.commit,
    )
    made.report["expected"] = EXPECTED
    return made


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="toy", help="folders, specifications or shapes (0.5b, 7b, toy)")
    parser.add_argument("--adapters", default="0", help="LoRA ranks; 0: none")
    parser.add_argument("--sides", default="woodshed")
    parser.add_argument("--loads", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--commit", default="", help="of this code, where it is no checkout")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "generation_beside_vllm.json"
    )
    options = parser.parse_args()
    options.loads = options.loads or ",".join(TOY_LOADS if options.models == "toy" else LOADS)
    return options


def key(side: str, model: str, rank: str | int, load: str) -> dict[str, Any]:
    name = Path(model).name if "/" in model else model
    return {"side": side, "model": name, "lora_rank": int(rank), "load": load}


def call(side: str, model: str, rank: str, options: argparse.Namespace) -> None:
    """One engine in a process of its own; what it measured before it failed stays."""
    python = options.vllm_python if side == "vllm" else sys.executable
    command = [python, __file__, "--side", side, "--models", model, "--adapters", rank]
    for name in ("loads", "repeats", "commit", "out"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, stdout=None, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{side} {model} LoRA {rank} failed: {done.stderr[-3000:]}", flush=True)


def measure_side(options: argparse.Namespace, rows: Rows) -> None:
    """Every load that has no row yet."""
    model, rank, side = options.models, int(options.adapters), options.side
    loads = TOY_LOADS if model == "toy" else LOADS
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        engine = opened(side, model, rank, Path(scratch))
        print(f"{side} {model} LoRA {rank}: ready after {time.perf_counter() - started:.0f} s", flush=True)
        for name in options.loads.split(","):
            about = key(side, model, rank, name)
            if not rows.has(**about):
                rows.add(
                    {**about, "repeats": options.repeats, **measured(engine, loads[name], options.repeats)}
                )


def opened(side: str, model: str, rank: int, scratch: Path) -> Any:
    if side == "served":
        import served_engine

        return served_engine.Served(model, rank, scratch)
    return {"woodshed": Woodshed, "vllm": VLLM}[side](model, rank, scratch)


def measured(engine: Any, load: Load, repeats: int) -> dict[str, Any]:
    """Figures of one load."""
    prompts, lengths = load.prompts(engine.vocabulary), load.lengths()
    decoding, whole = [], []
    converse(engine, load, prompts, lengths)  # compiles, captures and allocates
    for _ in range(repeats):
        engine.forget()
        prefill = 0.0
        if load.turns == 1:
            prefill, _ = timed(lambda: converse(engine, load, prompts, [[1] * load.rows]))
            engine.forget()
        seconds, written = timed(lambda: converse(engine, load, prompts, lengths))
        whole.append(seconds)
        decoding.append(seconds - prefill)
    tokens = load.tokens()
    found: dict[str, Any] = {
        "tokens": tokens,
        "whole_s": spread(whole),
        "whole_tokens_per_s": spread([tokens / seconds for seconds in whole]),
    }
    if load.turns == 1:
        found["decode_tokens_per_s"] = spread([tokens / seconds for seconds in decoding])
        found["decode_ms"] = spread([1000 * seconds / load.new for seconds in decoding])
    return found | engine.more(written) | {"versions": engine.versions}


def converse(
    engine: Any, load: Load, prompts: Sequence[tuple[int, ...]], lengths: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], Sequence[int], Sequence[float]]]:
    """(prompt, ids, log-probs) of every message, in rounds."""
    rng, found = random.Random(2), []
    heads = list(prompts)
    for turn, sizes in enumerate(lengths):
        asked = [
            Request(head, size, turn * load.rows + n)
            for n, (head, size) in enumerate(zip(heads, sizes, strict=True))
        ]
        written = engine.write(asked)
        found += [(head, *message) for head, message in zip(heads, written, strict=True)]
        for n, (ids, _) in enumerate(written):
            said = rng.randrange(load.observation // 3, load.observation)
            heads[n] = (*heads[n], *ids, *(rng.randrange(10, engine.vocabulary) for _ in range(said)))
    return found


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds; the engines return numbers, so the card has ended when they do."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


class Woodshed:
    """The local sampler on a model as it trains: an adapter stays unmerged."""

    def __init__(self, model: str, rank: int, scratch: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, Qwen2Config

        from woodshed.engines import local
        from woodshed.engines.engine import SamplerSettings
        from woodshed.engines.local import LocalEngine, invariant
        from woodshed.learning.policy import Policy, add_adapter

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        made: Any
        if model in SHAPES:
            config = Qwen2Config(**SHAPES[model], max_position_embeddings=CONTEXT)
            with torch.device(self.device):
                made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
            invariant.install(made)
        else:
            made = local.load(model, dtype="bfloat16").model.to(self.device)
        if rank:
            made = add_adapter(made, rank).to(self.device)
            for name, parameter in made.named_parameters():
                if "lora_B" in name:  # an adapter that does something; a new one adds nothing
                    parameter.data.normal_(0, 0.02)
            Policy(made, is_adapter=True)  # rounds the adapter, as training does
        self.model, self.versions = made, f"torch {torch.__version__}"
        self.vocabulary = min(made.config.vocab_size, 151_000)
        renderer: Any = NeverStops()
        self.sampler = LocalEngine(made, renderer, SamplerSettings(max_rows=512, cache_mb=49_152))

    def write(self, asked: list[Request]) -> Written:
        from woodshed.engines.engine import SampleRequest, sample_all

        samples = sample_all(self.sampler, [SampleRequest(r.prompt_ids, r.max_tokens, r.seed) for r in asked])
        return [(sample.ids, sample.logps) for sample in samples]

    def forget(self) -> None:
        self.sampler.flush()

    def more(
        self, written: Sequence[tuple[tuple[int, ...], Sequence[int], Sequence[float]]]
    ) -> dict[str, Any]:
        """|sampler's log-prob - trainer's| of the tokens of some messages; with an adapter with its gradients, as in
        training."""
        import torch

        from woodshed.experience.samples import TrainingSample
        from woodshed.learning.packing import pad
        from woodshed.learning.policy import Policy

        self.forget()
        policy, gaps = Policy(self.model, is_adapter=True), []
        for batch in _few_at_a_time(written[:: max(1, len(written) // 16)][:16]):
            rows = [
                TrainingSample((*head, *ids), tuple(range(len(head), len(head) + len(ids))), tuple(logps))
                for head, ids, logps in batch
            ]
            padded = pad(rows, self.device)
            logps_BN = policy.logps(padded, 1.0).detach()
            gaps.append((logps_BN - padded.logp_sampler_BN).abs()[padded.mask_BN > 0].cpu())
        gap = torch.cat(gaps)
        found = {"gap_max": float(gap.max()), "unequal": int((gap > 0).sum()), "compared": len(gap)}
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0
        return {**found, "peak_gib": round(peak, 2)}


def _few_at_a_time(items: Sequence[Any], most: int = 8192) -> Iterator[list[Any]]:
    """Messages in batches of a few thousand positions."""
    batch: list[Any] = []
    for item in items:
        if batch and (len(batch) + 1) * len(item[0]) > most:
            yield batch
            batch = []
        batch.append(item)
    yield batch


class NeverStops:
    """What the sampler asks of a renderer: which ids end a message."""

    stop_ids: frozenset[int] = frozenset()


if __name__ == "__main__":
    main()
