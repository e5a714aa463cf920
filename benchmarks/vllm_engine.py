"""vLLM's offline engine, for benchmarks beside it, and shapes of models that both sides fill with random weights."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "toy": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Of Qwen2.5-0.5B, -1.5B and -7B, from their published config.json."""
CONTEXT = 32_768


@dataclass(frozen=True)
class Request:
    """One message to be written."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int


Written = list[tuple[Sequence[int], Sequence[float]]]
"""Ids and log-probs of each message."""


class VLLM:
    """vLLM's offline engine."""

    def __init__(self, model: str, rank: int, scratch: Path) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        import vllm  # pyright: ignore[reportMissingImports]
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        folder = model
        if model in SHAPES:
            folder = str(write_shape(scratch / "model", model))
        config = json.loads((Path(folder) / "config.json").read_text())
        more: dict[str, Any] = {"load_format": "dummy"} if model in SHAPES else {}
        if rank:
            more |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        self.engine = vllm.LLM(
            model=folder,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=12_288,
            max_num_seqs=512,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            seed=0,
            **more,
        )
        self.adapter = (
            LoRARequest("trained", 1, str(write_adapter(scratch / "adapter", config, rank))) if rank else None
        )
        self.vocabulary = min(int(config["vocab_size"]), 151_000)
        self.versions = f"vllm {vllm.__version__}"

    def write(self, asked: list[Request]) -> Written:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        how = [
            SamplingParams(
                temperature=1.0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for request in asked
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in asked]
        out = self.engine.generate(prompts, how, use_tqdm=False, lora_request=self.adapter)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs.logprobs) for each in out]

    def forget(self) -> None:
        self.engine.reset_prefix_cache()

    def more(self, written: Sequence[Any]) -> dict[str, Any]:
        assert all(len(ids) == len(logps) for _, ids, logps in written)
        return {}


def write_shape(folder: Path, shape: str) -> Path:
    """A folder with a configuration and no weights."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **SHAPES[shape],
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(folder: Path, config: dict[str, Any], rank: int) -> Path:
    """A LoRA adapter with random weights on every linear layer but the output layer."""
    import torch
    from safetensors.torch import save_file

    hidden, wide = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    narrow = head * config["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (entering, leaving) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, entering).bfloat16() / entering**0.5
            weights[f"{prefix}.lora_B.weight"] = 0.02 * torch.randn(leaving, rank).bfloat16()
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.partition(".")[2] for name in sizes],
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
