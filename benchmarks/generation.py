"""Tokens a second of the local sampler on one GPU, against the same model run step by step and against transformers'
continuous batching; and the largest differences to the trainer's log-probabilities.

    python benchmarks/generation.py [--model DIR_OR_SPEC] [--lora-rank 16] [--rows 128] [--prompt 512] [--new 256]

Without --model: a model of the shape of Qwen2.5-0.5B with random weights (speed does not depend on them; no message
ends early, so the rows stay full). Bars (H100): 20,000 tokens a second at 128 rows; log-probabilities within 0.02 nats
of the trainer's on 99.9 % of the tokens in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from woodshed import machine
from woodshed.inference import local
from woodshed.inference.local import LocalSampler, invariant
from woodshed.inference.sampler import Sample, SampleRequest, SamplerSettings
from woodshed.training.packing import Row, pad
from woodshed.training.policy import Policy, add_adapter

BAR_TOKENS_PER_S = 20_000
BAR_NATS, BAR_SHARE = 0.02, 0.999
QWEN_0_5B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
"""Shape of Qwen2.5-0.5B, from its published config.json."""


class NeverStops:
    """What the sampler asks of a renderer: which ids end a message."""

    stop_ids: frozenset[int] = frozenset()


def random_model(device: str) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = dict(QWEN_0_5B)
    if device != "cuda":
        shape |= {"num_hidden_layers": 2, "vocab_size": 4000}
    model: Any = Qwen2ForCausalLM(Qwen2Config(**shape))
    return model.to(device, torch.bfloat16).eval()


def with_adapter(model: Any, rank: int) -> Any:
    """An adapter that does something; a new one adds nothing."""
    model = add_adapter(model, rank).to(model.device)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02)
    return model


def requests(rows: int, prompt: int, new: int, vocabulary: int, seed: int) -> list[SampleRequest]:
    """Prompts with a common first half, as the attempts at one task have."""
    dice = random.Random(seed)
    head = tuple(dice.randrange(10, vocabulary) for _ in range(prompt // 2))
    return [
        SampleRequest(head + tuple(dice.randrange(10, vocabulary) for _ in range(prompt - len(head))), new, i)
        for i in range(rows)
    ]


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def sampler_seconds(
    model: Any, asked: list[SampleRequest], settings: SamplerSettings, *, captured: bool, device: str
) -> tuple[float, list[Sample], float]:
    """(seconds of the decode steps alone, samples, seconds with prefill) of the second call; the first warms up."""
    sampler = LocalSampler(model, NeverStops(), settings)  # type: ignore[arg-type]
    short = [SampleRequest(request.prompt_ids, 1, request.seed) for request in asked]
    if not captured:
        sampler._graphs = None
    sampler.sample(asked if captured else short)
    sampler.flush()
    prefill_s, _ = timed(lambda: sampler.sample(short), device)
    sampler.flush()
    whole_s, samples = timed(lambda: sampler.sample(asked), device)
    return whole_s - prefill_s, samples, whole_s


def gaps(model: Any, asked: list[SampleRequest], samples: list[Sample]) -> torch.Tensor:
    """|sampler's log-prob - trainer's| of every token, the trainer's in padded forwards of a few rows."""
    policy, found = Policy(model, is_adapter=True), []
    for begin in range(0, len(asked), 5):
        rows = [
            Row(
                (*r.prompt_ids, *s.ids),
                tuple(range(len(r.prompt_ids), len(r.prompt_ids) + len(s.ids))),
                s.logps,
            )
            for r, s in zip(asked[begin : begin + 5], samples[begin : begin + 5], strict=True)
        ]
        padded = pad(rows, model.device)
        logps_BN = policy.logps(padded, 1.0).detach()  # with an adapter: and its gradients, as in training
        found.append((logps_BN - padded.logp_sampler_BN).abs()[padded.mask_BN > 0].cpu())
    return torch.cat(found)


def continuous_batching_seconds(model: Any, asked: list[SampleRequest], device: str) -> float | str:
    """Whole time of transformers' own continuous batching on the same prompts, or why it did not run."""
    from transformers import GenerationConfig

    new = asked[0].max_tokens
    config = GenerationConfig(
        max_new_tokens=new, do_sample=True, eos_token_id=-1, pad_token_id=0, use_cuda_graph=True
    )
    prompts = [list(request.prompt_ids) for request in asked]
    model.set_attn_implementation("sdpa")
    try:
        for _ in range(2):
            seconds, out = timed(
                lambda: model.generate_batch(prompts, generation_config=config, progress_bar=False), device
            )
        made = sum(len(each.generated_tokens) for each in out.values())
        if made != new * len(asked):
            return f"wrote {made} of {new * len(asked)} tokens"
        return seconds
    except Exception as error:  # whatever it is, the table says it
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: no adapter")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/generation.json"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.model:
        model = local.load(options.model, dtype="bfloat16").model.to(device)
    else:
        model = random_model(device)
        invariant.install(model)
    model.requires_grad_(False)
    if options.lora_rank:
        model = with_adapter(model, options.lora_rank)
    asked = requests(options.rows, options.prompt, options.new, model.config.vocab_size, seed=1)
    settings = SamplerSettings(max_rows=options.rows, cache_mb=16_384)
    tokens = options.rows * options.new
    rows: list[dict[str, Any]] = []
    result = {
        "lora_rank": options.lora_rank,
        "rows": options.rows,
        "prompt": options.prompt,
        "new": options.new,
        "ways": rows,
    }

    def keep(row: dict[str, Any]) -> None:
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        rows.append(row)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**result, "machine": machine.describe()}, indent=2) + "\n")

    for name, captured in (("captured graphs", True), ("step by step", False)):
        if captured and device != "cuda":
            continue
        decode_s, samples, whole_s = sampler_seconds(model, asked, settings, captured=captured, device=device)
        gap = gaps(model, asked[:16], samples[:16])
        keep(
            {
                "way": name,
                "decode_tokens_per_s": round(tokens / decode_s),
                "whole_tokens_per_s": round(tokens / whole_s),
                "ms_per_step": round(1000 * decode_s / options.new, 2),
                "gap_mean": round(float(gap.mean()), 5),
                "gap_max": round(float(gap.max()), 4),
                "gap_share_within_0.02": round(float((gap <= BAR_NATS).double().mean()), 5),
            }
        )
    other = continuous_batching_seconds(model, asked, device)
    keep(
        {"way": "transformers continuous batching", "whole_tokens_per_s": round(tokens / other)}
        if isinstance(other, float)
        else {"way": "transformers continuous batching", "failed": other}
    )


if __name__ == "__main__":
    main()
