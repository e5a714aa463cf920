"""`Trainer.step` over ranks is that of one process: losses, gradient norms, divergences, weights, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import learning_scenarios
import pytest
import torch
from learning_scenarios import SAVED, Training
from parallel_models import build
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from worlds import DEVICE, fitting, launch

from woodshed.engines.published import digest_of
from woodshed.learning import packing
from woodshed.learning.policy import Policy, PolicySettings
from woodshed.runs.folder import RunDir

KINDS = {
    "LoRA": {"rank": 4},
    "AdamW": {},
    "Muon": {"optimizer": "muon"},
}
LOST = "a step that one rank loses"
SIZES = fitting((4, 2))
TRAININGS = {
    **{kind: Training(**settings, steps=3) for kind, settings in KINDS.items()},
    "LoRA, live": Training(rank=4, teacher="live"),
    "AdamW, live": Training(teacher="live"),
    "Muon, frozen": Training(optimizer="muon", teacher="frozen"),
    "LoRA, frozen": Training(rank=4, teacher="frozen"),
    "trust region": Training(teacher="trust-region"),
    "separate": Training(forward="separate", teacher="frozen"),
    "shared rollouts": Training(forward="separate", layout={"cp": 2}),
    "shared rollouts, LoRA": Training(
        rank=4, forward="separate", layout={"cp": 2}, loss={"kl_coef": 0.05}, imitated=2
    ),
    "shared rollouts, layers computed again": Training(
        teacher="live", forward="separate", layout={"cp": 2}, activation_checkpointing=True
    ),
    "shared rollouts, Muon, experts": Training(
        "qwen", optimizer="muon", forward="separate", layout={"cp": 2, "ep": 2}, routed=True
    ),
    "experts": Training("qwen", steps=3, layout={"ep": 2}),
    "experts, LoRA": Training("qwen", rank=4, layout={"ep": 2}),
    "experts, Muon": Training("qwen", optimizer="muon", layout={"ep": 2}),
    "experts of an engine": Training("qwen", layout={"ep": 2}, routed=True),
    "replicas": Training(layout={"replicate": 2}),
    "a rank without rollouts": Training(rollouts=2, hinted=2, layout={"replicate": 2}),
    "a rank without hints": Training(hinted=1),
    "no policy gradient": Training(rollouts=0, hinted=1),
    "no hints": Training(hinted=0),
    "divergence in the reward": Training(rank=4, loss={"kl_coef": 0.05}),
    "divergence in the reward, full": Training(loss={"kl_coef": 0.05}),
    "imitation": Training(rollouts=0, hinted=0, imitated=7),
    "all losses": Training(imitated=2),
    LOST: Training(rank=4, is_lost=True),
    "layers computed again": Training(activation_checkpointing=True),
    "master weights": Training(dtype="bfloat16", steps=3),
}
ON_FEWER = (*SAVED, "shared rollouts", "shared rollouts, Muon, experts", "a rank without hints", LOST)
COMPARED = (
    "rl_loss",
    "kl_loss",
    "ce_loss",
    "grad_norm",
    "rl_grad_norm",
    "kl_grad_norm",
    "kl_factor",
    "entropy",
    "logp_gap_max",
    "logp_gap_mean",
    "kl_to_start",
    "hint_gain",
    "targets",
    "trained_rollouts",
    "ce_tokens",
    "lost",
)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Results of every rank by the number of ranks. The most ranks write checkpoints, the others read them."""
    folder, found = str(tmp_path_factory.mktemp("checkpoints")), {}
    for size in SIZES:
        found[size] = launch(size, "learning_scenarios:run", trainings_on(size), folder, SIZES[0])
    return found | {1: [learning_scenarios.run(TRAININGS, folder, SIZES[0])]}


def trainings_on(size: int) -> dict[str, Training]:
    """All on the most ranks, some on fewer; `benchmarks/ranks_equal.py` has all of them on both."""
    return TRAININGS if size == SIZES[0] else {name: TRAININGS[name] for name in ON_FEWER}


@pytest.mark.parametrize(("world", "name"), [(size, name) for size in SIZES for name in trainings_on(size)])
def test_ranks_equal_one(worlds: dict[int, list[dict[str, Any]]], name: str, world: int):
    one = worlds[1][0][name]
    # In bfloat16 each rank rounds its share of a gradient; Muon's products are in bfloat16 on a GPU.
    is_exact = TRAININGS[name].dtype == "float32" and (DEVICE == "cpu" or "Muon" not in name)
    tolerance, rel = (1e-5, 1e-4) if is_exact else (4e-3, 0.1)
    for several in (rank[name] for rank in worlds[world]):
        for before, after in zip(one["metrics"], several["metrics"], strict=True):
            assert after.keys() == before.keys()
            for key in set(COMPARED) & set(before):
                assert after[key] == pytest.approx(before[key], rel=rel, abs=tolerance, nan_ok=True), key
            turns = zip(before["divergences"], after["divergences"], strict=True)
            for one_turn, same_turn in turns:
                assert same_turn[0] == one_turn[0]
                assert same_turn[1] == pytest.approx(one_turn[1], rel=10 * rel, abs=10 * tolerance)
        assert several["weights"].keys() == one["weights"].keys()
        for key, weight in one["weights"].items():
            torch.testing.assert_close(several["weights"][key], weight, rtol=0, atol=tolerance, msg=key)


@pytest.mark.parametrize("name", ["LoRA", "AdamW, live", "Muon, frozen", "experts", "a rank without hints"])
def test_hinted_turns_share_a_forward_between_measurements(
    worlds: dict[int, list[dict[str, Any]]], name: str
):
    """The second step computes as many positions as in one process; separate forwards would compute more."""
    metrics = [rank[name]["metrics"] for world in worlds.values() for rank in world if name in rank]
    (positions,) = {each[1]["trained_positions"] for each in metrics}
    assert metrics[0][0]["trained_positions"] > positions, "the first one measured"


@pytest.mark.parametrize("world", [*SIZES[1:], 1])
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_ranks_loads_on_fewer_and_goes_on_as_one(
    worlds: dict[int, list[dict[str, Any]]], name: str, world: int
):
    kept, loaded = worlds[max(worlds)][0]["checkpoints"][name], worlds[world][0]["checkpoints"]
    assert loaded[name].keys() == kept.keys()
    assert [key for key in kept if not torch.equal(loaded[name][key], kept[key])] == []
    alone = worlds[1][0]["checkpoints"][f"{name}, a step later"]
    for key, weight in loaded[f"{name}, a step later"].items():
        torch.testing.assert_close(weight, alone[key], rtol=0, atol=1e-5, msg=key)


def test_a_step_that_one_rank_loses_moves_nothing_on_any(worlds: dict[int, list[dict[str, Any]]]):
    for rank in (rank for world in worlds.values() for rank in world if LOST in rank):
        metrics = rank[LOST]["metrics"]
        assert [each["lost"] for each in metrics] == [1, 0, 0]
        assert metrics[1]["rl_loss"] == metrics[0]["rl_loss"] != metrics[2]["rl_loss"]


def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path):
    folder = tmp_path / "AdamW"
    with pytest.raises(AssertionError, match="rank"):
        launch(2, "learning_scenarios:die_while_saving", TRAININGS["AdamW"], str(folder))
    RunDir(folder).lock()  # as a resume does: what is unfinished goes
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["rl-000002", "start"]
    kept = torch.load(folder / "kept.pt")
    loaded = learning_scenarios.load({"AdamW": TRAININGS["AdamW"]}, str(tmp_path))["AdamW"]
    assert all(torch.equal(loaded[key], value) for key, value in kept.items())


def test_ranks_read_their_own_shards(tmp_path: Path):
    """Ends that share a weight, an adapter, experts apart in the files, a buffer, and names of another family."""
    families = {
        "full": "llama",
        "LoRA": "llama",
        "experts": "qwen",
        "buffers": "deepseek",
        "renamed": "mixtral",
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    for family in families.values():
        build(family).save_pretrained(tmp_path / family)
        tokenizer.save_pretrained(tmp_path / family)
    folders = {name: str(tmp_path / family) for name, family in families.items()}
    for name, found in launch(2, "learning_scenarios:loaded", folders)[0].items():
        kind, _, is_scored = name.partition(", ")
        settings = PolicySettings(model=folders[kind], lora_rank=4 if kind == "LoRA" else 0, device="cpu")
        policy, _ = Policy.load(settings, seed=0)
        if is_scored:
            sample = learning_scenarios.samples_of(Training())[:1]
            torch.testing.assert_close(found[""], policy.logps(packing.pad(sample), 1.0).detach())
            continue
        expected = policy.model.state_dict()
        assert found.keys() == expected.keys()
        assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []


def test_what_ranks_export_is_whole(tmp_path: Path):
    """An adapter, a model whose ends share a weight, and experts of two ranks, for people, servers and engines."""
    trainings = {name: TRAININGS[name] for name in ("LoRA", "AdamW", "experts")}
    exported = launch(2, "learning_scenarios:exported", trainings, str(tmp_path))[0]
    for name, (weights, copied, digests) in exported.items():
        kept, served, expected = tmp_path / name / "policy", tmp_path / name / "served", weights
        if name == "LoRA":
            expected = {key.replace(".default", ""): value for key, value in weights.items()}
            held = [load_file(folder / "adapter_model.safetensors") for folder in (kept, served)]
        else:
            if name == "AdamW":
                expected = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
            whole = AutoModelForCausalLM.from_pretrained(kept).state_dict()
            held = [
                whole,
                {k: v for file in served.glob("*.safetensors") for k, v in load_file(file).items()},
            ]
            assert digests == {key: digest_of(value.numpy().tobytes()) for key, value in expected.items()}
            assert len(list((tmp_path / name / "difference").glob("delta-*"))) == 2
        for found, wanted in ((copied, weights), *((each, expected) for each in held)):
            assert found.keys() == wanted.keys()
            assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
