"""An exported model says what the run's policy says, for every adapter that PEFT can make, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_model import write_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from woodshed.engines import local
from woodshed.learning import checkpoint
from woodshed.learning.export import export
from woodshed.learning.policy import Policy, PolicySettings
from woodshed.records import ModelError
from woodshed.runs.folder import RunDir
from woodshed.tokens.renderer import create_renderer

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
LAYERS = ["q_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": LAYERS},
    "lm_head": {"target_modules": [*LAYERS, "lm_head"]},
    "embed_tokens": {"target_modules": [*LAYERS, "embed_tokens"]},
    "both ends": {"target_modules": ["embed_tokens", "lm_head"]},
    "both ends kept tied": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "a head of its own": {"target_modules": LAYERS, "modules_to_save": ["lm_head"]},
    "embeddings of its own": {"target_modules": LAYERS, "modules_to_save": ["embed_tokens"]},
    "both of its own": {"target_modules": LAYERS, "modules_to_save": ["embed_tokens", "lm_head"]},
    "both of its own, tied": {
        "target_modules": LAYERS,
        "modules_to_save": ["embed_tokens", "lm_head"],
        "ensure_weight_tying": True,
    },
    "rslora": {"target_modules": [*LAYERS, "lm_head"], "use_rslora": True},
    "dora": {"target_modules": LAYERS, "use_dora": True},
    "dora on the head": {"target_modules": [*LAYERS, "lm_head"], "use_dora": True},
    "dora on the embeddings": {"target_modules": [*LAYERS, "embed_tokens"], "use_dora": True},
    "ranks": {"target_modules": [*LAYERS, "lm_head"], "rank_pattern": {"q_proj": 2, "lm_head": 1}},
    "new tokens": {"target_modules": LAYERS, "trainable_token_indices": [5, 17]},
    "new tokens and the head": {"target_modules": [*LAYERS, "lm_head"], "trainable_token_indices": [5, 17]},
    "biases": {"target_modules": LAYERS, "lora_bias": True},
    "biases on the head": {"target_modules": ["lm_head"], "lora_bias": True},
}
REFUSED = {"biases", "biases on the head"}
"""A Llama's linear layers have no bias, so none can be merged."""


LOST = {("new tokens and the head", True)}
"""PEFT merges another model than it ran."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {tied: write_tiny_model(root / str(tied), tied=tied) for tied in (True, False)}


def log_probs(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float().log_softmax(-1)


def adapted(base: Path, folder: Path, options: dict[str, Any]) -> Tensor:
    """An adapter that changes much, as PEFT writes it; the log-probs of base and adapter, as PEFT loads them."""
    from peft import PeftModel

    torch.manual_seed(3)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, task_type="CAUSAL_LM", **options)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * (0.3 if "magnitude" not in name else 0.05))
    model.save_pretrained(str(folder))
    return log_probs(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder))


def run_with(base: Path, path: Path, dtype: str = "float32") -> RunDir:
    recipe = f'name = "x"\n[policy]\nmodel = "{base}"\ndtype = "{dtype}"\n'
    return RunDir.create(path, recipe=recipe, manifest={})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_exported_model_is_the_policy_or_is_refused(
    name: str, tied: bool, bases: dict[bool, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    run = run_with(bases[tied], tmp_path / "run")
    expected = adapted(bases[tied], run.path / "policy", ADAPTERS[name])
    assert (expected - log_probs(AutoModelForCausalLM.from_pretrained(bases[tied]))).abs().max() > 0.5
    capfd.readouterr()
    policy, _ = Policy.load(PolicySettings(model=str(bases[tied]), adapter=str(run.path / "policy")), seed=0)
    policy.export(tmp_path / "again")
    again = local.load(str(bases[tied]), adapter=tmp_path / "again").model
    assert (expected - log_probs(again)).abs().max() < 2e-3, "what a further run would write"
    if (name, tied) in LOST:
        with pytest.raises(
            ModelError, match=r"merged model is not the policy of this run.*Nothing is written"
        ):
            export(run, tmp_path / "out", problems=[])
        assert not (tmp_path / "out").exists()
        return
    if name in REFUSED:
        with pytest.raises(ModelError, match=r"cannot be merged into its base.*lora_bias"):
            export(run, tmp_path / "out", problems=[])
        assert not (tmp_path / "out").exists()
        return
    export(run, tmp_path / "out", problems=[])
    assert "it/s" not in capfd.readouterr().err, "a library's progress bar"
    found = log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (expected - found).abs().max() < 2e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_whole_weights_can_be_loaded_and_trained_on(
    tied: bool, dtype: str, bases: dict[bool, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """`policy.model = RUN/policy`: weights, tokenizer, chat template and generation config are all there."""
    base = bases[tied]
    config = GenerationConfig.from_pretrained(base)
    settings = PolicySettings.model_validate({"model": str(base), "lora_rank": 0, "dtype": dtype})
    policy, loaded = Policy.load(settings, seed=0)
    policy.model.generation_config.eos_token_id = [1, 2]
    with torch.no_grad():
        for weight in policy.trainable.values():
            weight.add_(torch.randn_like(weight) * 0.05)
    policy.round_weights()
    capfd.readouterr()
    run = run_with(base, tmp_path / "run", dtype)
    checkpoint.export(run, policy)
    assert "it/s" not in capfd.readouterr().err
    again, opened = Policy.load(PolicySettings(model=str(run.path / "policy"), lora_rank=0), seed=0)
    assert (log_probs(policy.model) - log_probs(again.model)).abs().max() < (
        1e-5 if dtype == "float32" else 0.5
    )
    assert opened.tokenizer.chat_template == loaded.tokenizer.chat_template
    assert opened.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    renderers = [create_renderer(o.tokenizer, codec="plain", model_dir=o.directory) for o in (loaded, opened)]
    assert renderers[0].hint("Look.") == renderers[1].hint("Look.")
    assert again.model.generation_config.eos_token_id == [1, 2] != config.eos_token_id
    out = export(run, tmp_path / "out", problems=[])
    assert AutoModelForCausalLM.from_pretrained(out).dtype == getattr(torch, dtype)
    found = log_probs(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))
    assert (log_probs(again.model) - found).abs().max() < 1e-5
