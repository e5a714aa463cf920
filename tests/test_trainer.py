"""One step for reinforcement learning, SFT and distillation, on a tiny real model; and what a trainer keeps."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_training import four_attempts, hint_for, samples_of, step, tiny_policy, trainer_of
from transformers import MistralConfig, MistralForCausalLM

from woodshed.experience.compile import rollout_sample, sft_sample
from woodshed.experience.samples import TrainingSample
from woodshed.learning import packing
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import Policy
from woodshed.learning.trainer import Trainer
from woodshed.records import RecipeError, Rollout, RunError, from_json, to_json


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    return four_attempts(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def samples(rollouts) -> tuple[TrainingSample, ...]:
    return samples_of(rollouts, [1.0, 0.0, 0.0, 0.5], [hint_for(rollouts[1], 0), hint_for(rollouts[3], 1)])


def test_samples_travel_as_json(samples):
    for sample in samples:
        assert from_json(TrainingSample, json.loads(json.dumps(to_json(sample)))) == sample


def test_every_sampled_token_knows_its_version(rollouts):
    turns = [
        replace(turn, versions=((n // 2, len(turn.sampled_ids)),)) for n, turn in enumerate(rollouts[0].turns)
    ]
    sample = rollout_sample(replace(rollouts[0], turns=tuple(turns)))
    lengths = [len(turn.sampled_ids) for turn in turns]
    assert sample.versions == ((0, lengths[0] + lengths[1]), (1, sum(lengths[2:])))


def test_a_stream_of_another_length_is_refused_by_name():
    with pytest.raises(RunError, match=r"'r1' has 1 ce_weights for 2 predicted tokens"):
        TrainingSample((1, 2, 3), (1, 2), ce_weights=(1.0,), rollout_id="r1")
    with pytest.raises(RunError, match=r"predicts tokens 0 to 2 of 3"):
        TrainingSample((1, 2, 3), (0, 2))


def test_hint_branches_without_a_teacher_are_refused(samples):
    trainer = Trainer(tiny_policy(), OptimizerSettings())
    with pytest.raises(RecipeError, match="give it `start`"):
        trainer.step(samples)


def sft_gradient(policy: Policy, imitated: list[TrainingSample]) -> dict[str, torch.Tensor]:
    """Of the mean negative log-prob of every imitated token, by loops."""
    logps = []
    for sample in imitated:
        all_logps = policy.model(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
        logps += [all_logps[i - 1, sample.ids[i]] for i in sample.predicted]
    loss = -torch.stack(logps).mean()
    found = torch.autograd.grad(loss, list(policy.trainable.values()))
    return {"loss": loss.detach(), **dict(zip(policy.trainable, found, strict=True))}


def test_sft_is_the_mean_over_imitated_tokens_and_adds_to_the_other_terms(rollouts, samples):
    """Each term keeps its own denominator: losses of a joint step are those of steps of their own."""
    imitated = [sft_sample(rollout_sample(made)) for made in rollouts[:2]]
    want = sft_gradient(tiny_policy(), imitated)
    alone = step(tiny_policy(), imitated, rate=0.0)
    assert alone["ce_loss"] == pytest.approx(float(want["loss"]), rel=1e-5)
    assert alone["ce_tokens"] == sum(len(sample.predicted) for sample in imitated)
    norm = torch.stack([want[name].norm() for name in tiny_policy().trainable]).norm()
    assert alone["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    without = step(tiny_policy(), samples, rate=0.0)
    joint = step(tiny_policy(), [*samples, *imitated], rate=0.0)
    assert without["ce_loss"] == alone["rl_loss"] == 0.0
    for name, source in (("ce_loss", alone), ("rl_loss", without), ("kl_loss", without)):
        assert joint[name] == pytest.approx(source[name], rel=1e-5), name


def test_a_loaded_trainer_goes_on_bit_for_bit(samples, tmp_path: Path):
    feedback = FeedbackSettings(teacher="ema")
    policy = tiny_policy()
    start = policy.snapshot()
    whole = trainer_of(policy, feedback=feedback, start=start, rate=1e-3)
    whole.step(samples)
    whole.save(tmp_path)
    again = trainer_of(tiny_policy(seed=0), feedback=feedback, start=start, rate=1e-3)
    again.load(tmp_path)
    assert whole.step(samples) == again.step(samples) and again.taken == 2
    for name, parameter in whole.policy.trainable.items():
        assert torch.equal(parameter, again.policy.trainable[name])


def test_log_probs_come_in_the_order_of_the_samples_and_by_the_weights_asked_for(rollouts):
    policy = tiny_policy()
    trainer, start = trainer_of(policy), policy.snapshot()
    asked = [rollout_sample(made) for made in rollouts]
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.05)
    for sample, then, now in zip(asked, trainer.logps(asked, start), trainer.logps(asked), strict=True):
        assert then == pytest.approx(sample.logps, abs=1e-4) and now != pytest.approx(then, abs=1e-3)


# --- several samples in a row -------------------------------------------------------------------------------------


def test_samples_of_one_row_have_the_log_probs_and_gradients_of_rows_of_their_own(rollouts):
    policy, own = tiny_policy(), [rollout_sample(made) for made in rollouts]
    gradients, logps = [], []
    for padded in (packing.pad(own), packing.pack(own)):
        logp_BN = policy.logps(padded, 1.0) * padded.mask_BN
        logps.append(logp_BN.detach())
        gradients.append(torch.autograd.grad(logp_BN.square().sum(), list(policy.trainable.values())))
    assert packing.pack(own).ids_RT.shape == (1, sum(len(sample.ids) for sample in own))
    assert (logps[0] - logps[1]).abs().max() < 1e-5
    for apart, together in zip(*gradients, strict=True):
        torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [9, 8, 5, 4, 2, 1], [1, 1, 30, 16, 15]])
def test_segments_of_similar_length_are_rows_of_one_call(lengths):
    segments = [packing.RowSegment(length) for length in lengths]
    groups = packing.similar(segments)
    assert [segment for group in groups for segment in group] == segments
    for group, behind in itertools.zip_longest(groups, groups[1:], fillvalue=[]):
        own = [segment.length for segment in group]
        assert max(own) <= 2 * min(own)
        joined = [*own, *(segment.length for segment in behind[:1])]
        assert not behind or max(joined) > 2 * min(joined)
        values = torch.randn(1, 3, sum(own), 4)
        rows = packing.as_rows(values, group)
        assert rows.shape == (len(own), 3, max(own), 4)
        assert torch.equal(packing.as_one_row(rows.transpose(1, 2), group), values.transpose(1, 2))


def test_segments_with_branches_are_attended_to_one_by_one():
    plain, branching = packing.RowSegment(8), packing.RowSegment(8, torch.ones(1, 1, 2, 10, dtype=torch.bool))
    found = packing.similar([plain, plain, branching, branching, plain])
    assert [len(group) for group in found] == [2, 1, 1, 1]


def test_no_sample_of_a_row_sees_another(rollouts):
    """Another first sample of the same length changes nothing behind it, but for rounding."""
    policy, (first, second, *_) = tiny_policy(), [rollout_sample(made) for made in rollouts]
    other = replace(first, ids=tuple(reversed(first.ids)))
    rows = [packing.pack([each, second]) for each in (first, other)]
    behind = [(policy.logps(row, 1.0) * row.mask_BN)[1] for row in rows]
    torch.testing.assert_close(*behind, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("forward", ["packed", "separate"])
def test_a_model_that_cannot_keep_samples_apart_gets_a_row_for_each_and_the_same_step(samples, forward):
    trainers = [trainer_of(tiny_policy(), feedback=FeedbackSettings(forward=forward)) for _ in range(2)]
    assert trainers[0].unpacked == ""
    trainers[1].unpacked = "its attention is another"
    together, apart = (trainer.step(samples) for trainer in trainers)
    assert together["trained_positions"] <= apart["trained_positions"]
    for name in ("rl_loss", "kl_loss", "grad_norm", "kl_factor", "entropy", "logp_gap_mean"):
        assert together[name] == pytest.approx(apart[name], rel=1e-4, abs=1e-6), name


def test_a_sliding_window_is_a_reason_for_a_row_each():
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    policy = Policy(MistralForCausalLM(config), is_adapter=False)
    trainer = Trainer(policy, OptimizerSettings())
    assert "sliding_window" in trainer.unpacked
    long = [TrainingSample(tuple(range(1, n)), tuple(range(5, n - 1))) for n in (20, 31)]
    alone = [trainer.logps([sample])[0] for sample in long]
    assert trainer.logps(long) == [pytest.approx(each, abs=1e-5) for each in alone]


# --- master weights -----------------------------------------------------------------------------------------------


def bfloat16_policy() -> Policy:
    """All weights of a tiny model in bfloat16, with float32 copies."""
    return Policy(tiny_policy(rank=0).model.bfloat16(), is_adapter=False)


def computed(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.model.named_parameters()}


def test_updates_that_bfloat16_would_round_away_accumulate(samples):
    """A step is 1e-4, and half a unit in the last place of the large weights 5e-4 and more."""
    policy = bfloat16_policy()
    before, start = computed(policy), policy.snapshot()
    assert {value.dtype for value in before.values()} == {torch.bfloat16}
    trainer = trainer_of(policy, rate=1e-4)
    for group in trainer.optimizer.param_groups:
        group["betas"] = (0.0, 0.9)
    moved = []
    for _ in range(16):
        trainer.step(samples)
        after = computed(policy)
        moved.append(sum(int(((after[n] != old) & (old.abs() > 0.13)).sum()) for n, old in before.items()))
    assert moved[0] == 0 < 100 < moved[-1]
    for name, master in policy.trainable.items():
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), after[name])
        assert not torch.equal(master, start[name])


def test_gradients_of_micro_batches_are_summed_in_float32(samples):
    """Steps of one and of many micro-batches have the same gradient, but for the rounding of each."""
    norms = []
    for tokens in (100_000, 64):
        loss = LossSettings(micro_batch_tokens=tokens)
        norms.append(trainer_of(bfloat16_policy(), loss=loss).step(samples)["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_run_with_master_weights_resumes_bit_for_bit(samples, tmp_path: Path, kind: str):
    def trainer() -> Trainer:
        feedback = FeedbackSettings(teacher="ema")
        return trainer_of(bfloat16_policy(), feedback=feedback, rate=1e-4, kind=kind)

    whole, again = trainer(), trainer()
    whole.step(samples)
    whole.save(tmp_path)
    again.load(tmp_path)
    assert whole.step(samples) == again.step(samples)
    for one, other in (
        (whole.policy.trainable, again.policy.trainable),
        map(computed, (whole.policy, again.policy)),
    ):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


# --- activation checkpointing -------------------------------------------------------------------------------------


def saved_bytes(policy: Policy, samples) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that a forward keeps for its backward outside of layers that are computed again, and the gradients."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        padded = packing.pack([rollout_sample(made) for made in samples])
        loss = (policy.logps(padded, 1.0) * padded.mask_BN).sum()
    gradients = torch.autograd.grad(loss, list(policy.trainable.values()))
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    return sum(size for place, size in kept.items() if place not in own), dict(
        zip(policy.trainable, gradients, strict=True)
    )


@pytest.mark.parametrize("rank", [0, 4])
def test_layers_that_are_computed_again_keep_little_and_give_the_same_gradients(rollouts, rank: int):
    plain, again = tiny_policy(rank=rank), tiny_policy(rank=rank)
    again = Policy(again.model, is_adapter=bool(rank), activation_checkpointing=True)
    (kept, want), (less, found) = saved_bytes(plain, rollouts), saved_bytes(again, rollouts)
    assert less < kept / 4
    for name, gradient in want.items():
        assert torch.equal(found[name], gradient), name


def test_hinted_turns_and_teachers_go_well_with_layers_that_are_computed_again(samples):
    """The kernels of a row of several samples are those of its forward, also after another forward."""
    again = Policy(tiny_policy().model, is_adapter=True, activation_checkpointing=True)
    for feedback in (FeedbackSettings(teacher="live"), FeedbackSettings(forward="separate")):
        loss = LossSettings(micro_batch_tokens=700, kl_coef=0.01)
        metrics = [
            step(policy, samples, feedback=feedback, loss=loss, rate=0.0) for policy in (tiny_policy(), again)
        ]
        assert metrics[0] == metrics[1]


def test_a_model_whose_layers_cannot_be_computed_again_is_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RecipeError, match="activation_checkpointing: Linear has no layers"):
        Policy(model, is_adapter=False, activation_checkpointing=True)
