"""Trained tokens a second and peak memory beside TRL's GRPO: same weights, prompts, lengths, batch and machine.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl peft vllm                  TRL in a place of its own
    python benchmarks/grpo_side_by_side.py --trl-python /tmp/trl/bin/python             toy size, for any machine
    python benchmarks/grpo_side_by_side.py --trl-python ... --model Qwen/Qwen2.5-Coder-0.5B-Instruct --dtype bfloat16 \
        --prompts 16 --group 8 --prompt-tokens 512 --new 256 --steps 6 \
        --sides woodshed:16,trl-vllm:16,woodshed:64,trl-vllm:64,trl-generate:16          the card's table

Bar: at least 1.3 times the trained tokens a second of TRL as its users run it, peak memory no higher. A side is a name
and how many sequences it takes in a forward-backward: `trl-vllm` generates with vLLM on the same card and, as its
fastest settings do, without the forward that corrects for vLLM's own numerics; `trl-generate` with transformers, which
is TRL's default. All sides sample at temperature 1 to exactly `--new` tokens (no message may end early), reward the
share of even token ids, subtract the group's mean, and take one AdamW step on a LoRA adapter of the same rank: Dr. GRPO
without a divergence from a reference, no gradient checkpointing. Each side is a process of its own; the first step,
which compiles and allocates, is not counted; figures are least, median and most of the others. Peak memory is what
PyTorch had allocated in the process; vLLM's pool of keys and values is of a size one chooses (TRL's default, 0.3 of the
card) and is in it. On a CPU seconds are processor seconds (set OMP_NUM_THREADS=1), and memory is the process's peak
resident set less what it held before the weights were loaded. Each row is written as it is measured and not twice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kept_rows import Rows, spread

BAR = 1.3
EXPECTED = {
    "step_s, median": {
        "woodshed:16": 2.98,
        "trl-vllm:16": 3.84,
        "woodshed:64": 2.37,
        "trl-vllm:64": 3.12,
        "trl-generate:16": 11.3,
    },
    "against trl-vllm": "1.29 to 1.33 times its trained tokens a second, a third to a half of its memory",
    "against trl-generate": "3.8 times its trained tokens a second, 0.97 times its memory",
}
"""Written down before the run."""
TOY = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
WORDS = "the file test call read edit shell word line name path value list text".split()


def main() -> None:
    options = _options()
    if options.side:
        side = woodshed_side if options.side == "woodshed" else trl_side
        options.report.write_text(json.dumps(side(options)))
        return
    private = ("out", "report", "side", "sides", "trl_python", "micro_rows", "commit")
    settings = {name: value for name, value in vars(options).items() if name not in private}
    rows = Rows(options.out, settings, key=("side", "micro_rows"), commit=options.commit)
    rows.report["expected"] = EXPECTED
    with tempfile.TemporaryDirectory() as scratch:
        if not options.model:
            options.model = str(write_toy(Path(scratch) / "model"))
        for named in options.sides.split(","):
            side, _, micro_rows = named.partition(":")
            options.micro_rows = int(micro_rows or options.micro_rows)
            if not rows.has(side=side, micro_rows=options.micro_rows):
                found = measure(side, options, Path(scratch))
                if found is not None:
                    rows.add(found)
                    rows.write(ratios=ratios(rows.rows))
    for line in ratios(rows.rows):
        print("  ".join(f"{name}={value}" for name, value in line.items()))


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our medians over theirs, where both take as many sequences at a time."""
    found = []
    for ours in (row for row in rows if row["side"] == "woodshed"):
        for theirs in rows:
            if theirs["side"] != "woodshed" and theirs["micro_rows"] == ours["micro_rows"]:
                found.append(
                    {
                        "against": theirs["side"],
                        "micro_rows": ours["micro_rows"],
                        "faster": round(ours["tokens_per_s"][1] / theirs["tokens_per_s"][1], 3),
                        "memory": round(ours["peak_gib"] / theirs["peak_gib"], 3),
                    }
                )
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO side by side with TRL.")
    parser.add_argument(
        "--model", default="", help="model directory or hub id; empty: a random Llama of toy size"
    )
    parser.add_argument("--trl-python", default=sys.executable, help="the Python that has TRL")
    parser.add_argument("--sides", default="woodshed:4,trl-generate:4", help="side:micro-rows, ...")
    parser.add_argument("--commit", default="", help="of this code, where it is no checkout")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a step")
    parser.add_argument("--group", type=int, default=4, help="answers to each")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--micro-rows", type=int, default=4, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=4, help="steps, the first not counted")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, default=Path(), help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "grpo_side_by_side.json"
    )
    return parser.parse_args()


def measure(side: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any] | None:
    """One side in a process of its own, with this file's options; None where it failed."""
    report = scratch / f"{side}-{options.micro_rows}.json"
    python = sys.executable if side == "woodshed" else options.trl_python
    command = [python, __file__, "--side", side, "--report", str(report)]
    for name, value in vars(options).items():
        if name not in ("side", "sides", "report", "out", "trl_python"):
            command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not report.exists():
        print(f"{side} failed:\n{(done.stderr or done.stdout)[-3000:]}", flush=True)
        return None
    return json.loads(report.read_text())


def write_toy(folder: Path) -> Path:
    """A random Llama with the byte-level tokenizer of the tests."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    import torch
    from tiny_model import tiny_tokenizer  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    LlamaForCausalLM(LlamaConfig(vocab_size=4096, **TOY, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompts_of(step: int, tokenizer: Any, options: argparse.Namespace) -> list[str]:
    """Texts of about as many tokens as asked for; the same on both sides."""
    rng, texts = random.Random(step), []
    for _ in range(options.prompts):
        ids = tokenizer(" ".join(rng.choices(WORDS, k=options.prompt_tokens))).input_ids
        texts.append(tokenizer.decode(ids[: options.prompt_tokens]))
    return texts


def clock() -> float:
    """Seconds: of the wall with a card, else of this process's processors, so that other work does not count."""
    import torch

    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def even_share(ids: Any) -> float:
    return sum(int(i) % 2 == 0 for i in ids) / max(len(ids), 1)


class Memory:
    """Peak of a side: allocated on the card, or resident above what was there before the weights."""

    def __init__(self) -> None:
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def peak_gib(self) -> float:
        import torch

        if torch.cuda.is_available():
            return round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before) / 2**20


def result(
    side: str, ends: list[float], generating: list[float], options: argparse.Namespace
) -> dict[str, Any]:
    """Figures of the steps after the first; `ends` are the times at which steps ended."""
    steps = [end - begin for begin, end in itertools.pairwise(ends)]
    tokens = options.prompts * options.group * options.new
    return {
        "side": side,
        "micro_rows": options.micro_rows,
        "tokens_per_s": spread([tokens / seconds for seconds in steps]),
        "step_s": spread(steps),
        "generating_s": spread(generating[1:]),
    }


def woodshed_side(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from woodshed.engines.engine import SampleRequest, SamplerSettings, WeightUpdate, sample_all
    from woodshed.engines.local import LocalEngine
    from woodshed.experience.compile import compile_samples
    from woodshed.learning.loss_settings import LossSettings
    from woodshed.learning.optimizer import OptimizerSettings
    from woodshed.learning.policy import Policy, PolicySettings
    from woodshed.learning.trainer import Trainer
    from woodshed.records import Group, Patch, Rollout, Turn, Verdict

    class NeverStops:
        stop_ids: frozenset[int] = frozenset()

    memory = Memory()
    chosen = PolicySettings(model=options.model, dtype=options.dtype, lora_rank=options.lora_rank)
    policy, loaded = Policy.load(chosen, seed=0)
    rows = options.prompts * options.group
    renderer: Any = NeverStops()
    sampler = LocalEngine(policy.model, renderer, SamplerSettings(max_rows=rows))
    length = options.prompt_tokens + options.new
    trainer = Trainer(
        policy,
        OptimizerSettings(learning_rate=1e-6, warmup_steps=0),
        LossSettings(micro_batch_tokens=options.micro_rows * length),
        message_tokens=options.new,
    )
    ends, generating = [], []
    for step in range(options.steps):
        started = clock()
        sampler.flush()
        prompts = [
            tuple(loaded.tokenizer(text).input_ids) for text in prompts_of(step, loaded.tokenizer, options)
        ]
        asked = [
            SampleRequest(ids, options.new, seed=step * rows + p * options.group + n)
            for p, ids in enumerate(prompts)
            for n in range(options.group)
        ]
        samples = sample_all(sampler, asked)
        sampler.flush()
        generating.append(clock() - started)
        rollouts = [
            Rollout(
                str(n),
                str(n // options.group),
                "",
                n,
                0,
                (Turn(request.prompt_ids, 0, s.ids, s.logps, s.versions, "length", "", (), (), None),),
                Patch({}),
                "finished",
                0.0,
            )
            for n, (request, s) in enumerate(zip(asked, samples, strict=True))
        ]
        verdicts = {
            made.id: Verdict(
                made.id, made.task_id, "graded", even_share(made.turns[0].sampled_ids), False, {}
            )
            for made in rollouts
        }
        groups = [
            Group(str(p), tuple(rollouts[p * options.group : (p + 1) * options.group]))
            for p in range(options.prompts)
        ]
        trainer.step(compile_samples(groups, verdicts, [], renderer).samples)
        sampler.update_weights(WeightUpdate("shared"), step + 1)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append(clock())
    versions = f"torch {torch.__version__}"
    return result("woodshed", ends, generating, options) | {
        "peak_gib": memory.peak_gib(),
        "versions": versions,
    }


def trl_side(options: argparse.Namespace) -> dict[str, Any]:
    import pyarrow  # pyright: ignore[reportMissingImports]
    import torch
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    memory = Memory()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    ends: list[float] = []
    generating: list[float] = []

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(clock())

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            started = clock()
            found = super()._generate(*args, **kwargs)
            generating.append(clock() - started)
            return found

    def reward(completion_ids: Any, **kwargs: Any) -> list[float]:
        return [even_share(ids) for ids in completion_ids]

    rows = options.prompts * options.group
    generator: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": options.new}}
    if options.side == "trl-vllm":
        generator = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_importance_sampling_correction": False,
            "vllm_max_model_length": 64 + options.prompt_tokens + options.new,
            "generation_kwargs": {"ignore_eos": True},
        }
    texts = [text for step in range(options.steps) for text in prompts_of(step, tokenizer, options)]
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=options.micro_rows,
            gradient_accumulation_steps=rows // options.micro_rows,
            num_generations=options.group,
            max_completion_length=options.new,
            **generator,
            max_steps=options.steps,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="dr_grpo",
            scale_rewards="none",
            gradient_checkpointing=False,
            bf16=options.dtype == "bfloat16",
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        lora = LoraConfig(
            r=options.lora_rank,
            lora_alpha=2 * options.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        trainer = Timed(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset(pyarrow.table({"prompt": texts}), fingerprint="prompts"),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[Ends()],
        )
        trainer.train()
    versions = f"trl {trl.__version__}, torch {torch.__version__}"
    if options.side == "trl-vllm":
        import vllm  # pyright: ignore[reportMissingImports]

        versions += f", vllm {vllm.__version__}"
    found = result(options.side, ends, generating, options)
    return found | {"peak_gib": memory.peak_gib(), "versions": versions}


if __name__ == "__main__":
    main()
