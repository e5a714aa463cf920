"""Log-probs of a mixture of experts, trainer against engine, with and without router replay.

    python benchmarks/router_replay.py [--sequences 24]

The local engine samples from a copy of the model in bfloat16 and tells its experts; the trainer computes in float32.
Models are of Hugging Face classes with random weights, wide enough that some router scores nearly tie at every token.

Ways: `none`, the trainer's own routers; `replay`, the engine's experts; `damaged`, a log in which one choice in fifty
is another token's, taken as it is; `refilled`, the same log with implausible choices refilled from the router's own
candidates. Reported: absolute gap of sampled tokens in nats (mean, median, p99), the share of choices that differ, and
the share of logged choices that were dropped.
"""

from __future__ import annotations

import argparse
import copy
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from woodshed.engines import expert_log
from woodshed.engines.engine import Sample, SampleRequest, SamplerSettings, sample_all
from woodshed.engines.local import LocalEngine, routing
from woodshed.experience.samples import TrainingSample
from woodshed.learning import packing, router_replay
from woodshed.learning.policy import Policy
from woodshed.runs import machine

SHARED: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "initializer_range": 0.1,  # peaked distributions, so that attention and routing matter
    "pad_token_id": 0,
}
PROMPT, MESSAGE, DAMAGE = 64, 64, 0.02


def models() -> dict[str, Any]:
    """A model of each family: routers by softmax, and by sigmoid within groups of experts."""
    torch.manual_seed(0)
    qwen = transformers.Qwen3MoeConfig(
        **SHARED, **{"num_experts": 64, "num_key_value_heads": 4, "head_dim": 16, "norm_topk_prob": True}
    )
    deepseek = transformers.DeepseekV3Config(
        **SHARED,
        n_routed_experts=64,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    )
    return {
        "Qwen3-MoE": transformers.Qwen3MoeForCausalLM(qwen),
        "DeepSeek-V3": transformers.DeepseekV3ForCausalLM(deepseek),
    }


def sampled(model: Any, sequences: int) -> list[TrainingSample]:
    """Messages of an engine in bfloat16, with its experts."""
    renderer: Any = SimpleNamespace(stop_ids=())
    lower = copy.deepcopy(model).to(torch.bfloat16)
    engine = LocalEngine(lower, renderer, SamplerSettings(), tells_experts=True)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, 340, PROMPT).tolist()) for _ in range(sequences)]
    requests = [SampleRequest(prompt, MESSAGE, seed=number) for number, prompt in enumerate(prompts)]
    samples = sample_all(engine, requests)
    engine.close()
    return [_training(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]


def _training(prompt: tuple[int, ...], sample: Sample) -> TrainingSample:
    assert sample.experts is not None, "the engine tells no experts"
    ids = (*prompt, *sample.ids)
    return TrainingSample(ids, tuple(range(len(prompt), len(ids))), sample.logps, experts=(sample.experts,))


def damaged(sample: TrainingSample, rng: np.random.Generator) -> TrainingSample:
    """The sample with some choices of another token in its log."""
    chosen = expert_log.read(sample.experts[0])
    hits = rng.random(chosen.shape) < DAMAGE
    return replace(sample, experts=(expert_log.write(0, np.where(hits, np.roll(chosen, 7, 0), chosen)),))


@contextmanager
def as_it_is() -> Any:
    """Replay without a look at what the router can have chosen."""

    def taken(_scores: Any, logged: Any, own: Any) -> Any:
        is_known = (logged >= 0).all(-1, keepdim=True)
        return torch.where(is_known, logged, own), logged >= 0

    with mock.patch.object(router_replay, "refilled", taken):
        yield


def measure(policy: Policy, samples: list[TrainingSample]) -> dict[str, float]:
    """Gaps of sampled tokens."""
    gaps = []
    with torch.no_grad():
        for sample in samples:
            logps = policy.logps(packing.pad([sample]), 1.0)[0]
            gaps.append((logps - torch.tensor(sample.logps)).abs().numpy())
    gap = np.concatenate(gaps)
    logged, dropped = policy.replay.take_counts()
    return {
        "mean": float(gap.mean()),
        "median": float(np.median(gap)),
        "p99": float(np.quantile(gap, 0.99)),
        "dropped": dropped / logged if logged else 0.0,
    }


def differing(model: Any, samples: list[TrainingSample]) -> float:
    """Share of the engine's choices that are not among the trainer's own."""
    missing = total = 0
    for sample in samples:
        with torch.no_grad(), routing.routers_of(model).told() as told:
            model(input_ids=torch.tensor([sample.ids[:-1]]), use_cache=False)
        own, engine = torch.stack(told, 1).numpy(), expert_log.read(sample.experts[0])
        missing += int((engine[..., :, None] != own[..., None, :]).all(-1).sum())
        total += engine.size
    return missing / total


def main() -> None:
    parser = argparse.ArgumentParser(description="Router replay: log-prob gaps of a mixture of experts.")
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "router_replay.json")
    options = parser.parse_args()
    rows = []
    for family, model in models().items():
        model.eval()
        policy, samples = Policy(model, is_adapter=False), sampled(model, options.sequences)
        broken = [damaged(sample, np.random.default_rng(n)) for n, sample in enumerate(samples)]
        bare = [replace(sample, experts=()) for sample in samples]
        share = differing(model, samples)
        for way, given in (("none", bare), ("replay", samples), ("damaged", broken), ("refilled", broken)):
            if way == "damaged":
                with as_it_is():
                    found = measure(policy, given)
            else:
                found = measure(policy, given)
            rows.append({"family": family, "way": way, "differing": share, **found})
            print(f"{family:<12} {way:<9} " + " ".join(f"{key} {value:.5f}" for key, value in found.items()))
    report = {
        "rows": rows,
        "tokens": options.sequences * MESSAGE,
        "damage": DAMAGE,
        "machine": machine.describe(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
