"""Hinted turns as branches of their rollout give the numbers of separate forwards, on a tiny real model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_training import (
    HINT,
    feedback_of,
    four_attempts,
    hint_for,
    last_norm,
    samples_of,
    step,
    tiny_policy,
    trainer_of,
)
from transformers import GptOssConfig, GptOssForCausalLM, MistralConfig, MistralForCausalLM

from woodshed.experience.samples import HintBranch, TrainingSample, student_view, teacher_view
from woodshed.learning import packing, prefix_tree, trainer
from woodshed.learning.grad_norms import GradNorms
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.policy import Policy
from woodshed.learning.prefix_tree import hinted_turns
from woodshed.learning.step_inputs import StepInputs
from woodshed.learning.teacher import Teacher
from woodshed.records import Hint, Rollout


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    return four_attempts(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def samples(rollouts) -> tuple[TrainingSample, ...]:
    """Seven targets: three in one rollout, some in rollouts without advantage, hints of several lengths."""
    hints = [
        hint_for(rollouts[0], 2, "Reminder: be brief."),
        *(hint_for(rollouts[1], turn, HINT + " " * 3 * turn + "x" * turn) for turn in range(3)),
        hint_for(rollouts[2], 0),
        hint_for(rollouts[3], 1),
        hint_for(rollouts[3], 2),
    ]
    made = samples_of(rollouts, [1.0, 0.5, 0.5, 0.0], hints)
    assert sum(sample.has_advantage for sample in made) == 2 and len(hinted_turns(made)) == 7
    return made


def work(
    samples: Sequence[TrainingSample],
    feedback: FeedbackSettings,
    *,
    kl_coef: float = 0.0,
    tokens: int = 2048,
) -> StepInputs:
    """A policy that has moved away from its start."""
    policy = tiny_policy()
    start = policy.snapshot()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    loss = LossSettings(kl_coef=kl_coef, micro_batch_tokens=tokens)
    return StepInputs(policy, Teacher(policy, start, feedback), samples, loss, feedback, 1.0, 160)


def close(a: trainer.Gradient, b: trainer.Gradient) -> bool:
    scale = max(float(g.abs().max()) for g in a.values())
    assert scale > 0
    return all((a[name] - b[name]).abs().max() <= 1e-4 * scale for name in a)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["frozen", "live", "ema", "trust-region"])
def test_packed_and_separate_forwards_give_the_same_losses_and_gradients(samples, kind, kl_coef):
    feedback = FeedbackSettings(teacher=kind, teacher_rate=0.3)
    apart, together = (work(samples, feedback, kl_coef=kl_coef) for _ in range(2))
    want, got = trainer.separate(apart), trainer.branching(together)
    assert close(want[0], got[0]) and close(want[1], got[1])
    for name, value in apart.metrics.means().items():
        if name != "trained_positions":
            assert together.metrics.means()[name] == pytest.approx(value, rel=1e-4, abs=1e-4)
    assert together.metrics.means()["trained_positions"] < apart.metrics.means()["trained_positions"]


@pytest.mark.parametrize("kind", ["frozen", "live"])
def test_whole_episodes_branch_off_before_their_first_turn(rollouts, kind):
    hints = [hint_for(made, 0, "A solution: return 2 * x") for made in rollouts[:3]]
    made = samples_of(rollouts, [1.0, 0.5, 0.5, 0.0], hints, scope="rollout", skip_first=1)
    assert [len(branch.predicted) for _, branch in hinted_turns(made)] == [
        sum(len(turn.sampled_ids) for turn in rollout.turns) for rollout in rollouts[:3]
    ]
    feedback = FeedbackSettings(teacher=kind)
    apart, together = work(made, feedback), work(made, feedback)
    want, got = trainer.separate(apart), trainer.branching(together)
    assert close(want[0], got[0]) and close(want[1], got[1])
    token_divergences = {
        (taught.rollout_id, taught.turn): taught for taught in apart.metrics.token_divergences()
    }
    assert len(token_divergences) == sum(len(rollout.turns) for rollout in rollouts[:3])
    for rollout in rollouts[:3]:
        for number, turn in enumerate(rollout.turns):
            assert len(token_divergences[rollout.id, number].divergence) == len(turn.sampled_ids)


@pytest.mark.parametrize("support", ["teacher", "full"])
def test_also_with_other_supports_ratios_and_masks(rollouts, support):
    hints = [hint_for(rollouts[1], turn) for turn in range(3)]
    made = samples_of(rollouts, [1.0, 0.5, 0.5, 0.0], hints, skip_first=2)
    feedback = feedback_of({"support": support, "max_ratio": 2.0, "reduction": "token"})
    want, got = trainer.separate(work(made, feedback)), trainer.branching(work(made, feedback))
    assert close(want[1], got[1])


def test_log_probs_of_every_hinted_token_agree_to_1e_4(samples):
    policy = tiny_policy()
    trunks = [prefix_tree.trunk(sample) for sample in samples]
    both = prefix_tree.pad(trunks)
    assert both.branches is not None
    logps = policy.logits(both.padded).log_softmax(-1).flatten(0, 1)
    hinted = hinted_turns(trunks)
    for at, rows in (
        (both.student_GN, [student_view(*each) for each in hinted]),
        (both.teacher_GN, [teacher_view(*each) for each in hinted]),
    ):
        apart = packing.pad(rows)
        gap = (logps[at] - policy.logits(apart).log_softmax(-1)).abs().amax(-1) * apart.mask_BN
        assert gap.max() < 1e-4


@pytest.mark.parametrize("kind", ["frozen", "live"])
def test_one_backward_pass_gives_the_sum_of_both_gradients(samples, kind):
    feedback = FeedbackSettings(teacher=kind)
    apart = trainer.branching(work(samples, feedback))
    joint = trainer.branching_joint(work(samples, feedback), 0.25)
    assert close({name: apart[0][name] + 0.25 * apart[1][name] for name in joint}, joint)


def test_between_measurements_the_last_factor_holds(samples):
    feedback = feedback_of(measure_every=3, weight=50.0)
    exact = step(tiny_policy(), samples, feedback=feedback, steps=1, rate=1e-3)
    later = step(tiny_policy(), samples, feedback=feedback, steps=3, rate=1e-3)
    again = step(tiny_policy(), samples, feedback=feedback, steps=4, rate=1e-3)
    assert later["kl_factor"] == exact["kl_factor"] != again["kl_factor"]
    assert later["rl_grad_norm"] == exact["rl_grad_norm"] != again["rl_grad_norm"]


def updated(
    policy: Policy, samples: Sequence[TrainingSample], norms: GradNorms, feedback: FeedbackSettings
) -> dict[str, Any]:
    trainer = trainer_of(policy, feedback=feedback, rate=0.0)
    trainer.norms = norms
    return trainer.step(samples)


@pytest.mark.parametrize("grown", [1.0, 100.0])
def test_a_joint_gradient_larger_than_the_measured_norms_allow_is_measured_at_once(samples, grown):
    """The targeted gradient was a hundredth when it was measured: its factor would let it outgrow the policy's."""
    feedback = feedback_of(weight=50.0, measure_every=1000)
    policy, norms = tiny_policy(), GradNorms()
    want = updated(policy, samples, norms, feedback)
    assert norms.unmeasured == 0
    norms.kl_last /= grown
    found = updated(policy, samples, norms, feedback)
    assert norms.unmeasured == (1 if grown == 1.0 else 0)
    for name in (
        "kl_factor",
        "grad_norm",
        "kl_grad_norm",
        "rl_loss",
        "kl_loss",
        "targets",
        "trained_positions",
    ):
        assert found[name] == pytest.approx(want[name], rel=1e-5), name


def test_norms_that_are_not_finite_are_measured_again(samples):
    feedback, policy, norms = feedback_of(measure_every=1000), tiny_policy(), GradNorms()
    updated(policy, samples, norms, feedback)
    for odd in ({"rl_last": math.nan}, {"kl_last": math.inf}, {"kl_last": math.nan}):
        norms = replace(norms, **odd)
        assert math.isfinite(updated(policy, samples, norms, feedback)["kl_factor"]) and norms.unmeasured == 0


def test_without_a_policy_gradient_the_targeted_one_is_measured_every_step(samples):
    """It costs no second backward pass there."""
    feedback, policy, norms = feedback_of(measure_every=1000), tiny_policy(), GradNorms()
    unrewarded = [replace(sample, advantages=()) for sample in samples]
    for _ in range(2):
        updated(policy, unrewarded, norms, feedback)
        assert norms.unmeasured == 0


def test_the_split_into_micro_batches_changes_nothing(samples):
    feedback = FeedbackSettings()
    want = trainer.branching(work(samples, feedback, tokens=100_000))
    got = trainer.branching(work(samples, feedback, tokens=100))
    assert close(want[0], got[0]) and close(want[1], got[1])


def test_what_comes_after_a_hinted_turn_changes_nothing(rollouts):
    """The targeted gradient of a turn does not depend on how long its rollout goes on."""
    hints = [hint_for(rollouts[1], 0)]
    longer = samples_of(rollouts, [0.0] * 4, hints)
    short = replace(rollouts[1], turns=rollouts[1].turns[:1])
    shorter = samples_of([rollouts[0], short, *rollouts[2:]], [0.0] * 4, hints)
    assert close(*(trainer.branching(work(b, FeedbackSettings()))[1] for b in (longer, shorter)))


@pytest.mark.parametrize("kind", ["frozen", "live"])
def test_no_gradient_outside_hinted_turns_and_none_through_the_teacher(rollouts, kind):
    made = samples_of(rollouts, [0.0] * 4, [hint_for(rollouts[1], 0), hint_for(rollouts[1], 2)])
    job = work(made, FeedbackSettings(teacher=kind))
    seen = []
    hook = last_norm(job.policy).register_forward_hook(
        lambda _module, _inputs, hidden: (
            hidden.retain_grad() if hidden.requires_grad else None,
            seen.append(hidden),
        )[1]
    )
    trainer.branching(job)
    hook.remove()
    trunk = prefix_tree.trunk(job.samples[0])
    assert len(trunk.predicted) == sum(len(rollouts[1].turns[t].sampled_ids) for t in (0, 2))
    with_gradient = [hidden for hidden in seen if hidden.requires_grad]
    assert len(with_gradient) == 1 and len(seen) == (1 if kind == "live" else 2)
    taught = with_gradient[0].grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert taught == [i - 1 for i in trunk.predicted]


def test_with_weight_zero_the_packed_forward_is_rl_alone_bit_for_bit(rollouts, samples):
    plain, zero = tiny_policy(), tiny_policy()
    step(plain, samples_of(rollouts, [1.0, 0.5, 0.5, 0.0]))
    step(zero, samples, feedback=FeedbackSettings(weight=0.0, forward="packed"))
    for name, parameter in plain.trainable.items():
        assert torch.equal(parameter, zero.trainable[name])


# --- the mask -----------------------------------------------------------------------------------------------------

TRUNK = 8


def branch_of(position: int, length: int) -> HintBranch:
    return HintBranch(Hint("", 0, "", ""), position, (1,) * length, (TRUNK - 1,), (1.0,), ((0, 1),))


def may_see(branches: Sequence[HintBranch], q: int, k: int) -> bool:
    """The rule in words: the past of one's own branch, and of the trunk what lies before the hint."""
    owner = [number for number, branch in enumerate(branches) for _ in branch.ids]
    if k < TRUNK:
        return k < branches[owner[q]].position
    return k - TRUNK <= q and owner[q] == owner[k - TRUNK]


def test_the_mask_is_the_rule():
    branches = [branch_of(3, 3), branch_of(6, 4), branch_of(0, 1)]
    mask = prefix_tree.visible(branches, TRUNK)
    for q, k in itertools.product(range(8), range(TRUNK + 8)):
        assert bool(mask[q, k]) == may_see(branches, q, k)
    assert mask.any(-1).all()  # an empty row would be NaN


# --- models that cannot take it -----------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 608,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_models_that_look_back_a_fixed_distance_are_refused_with_the_reason():
    assert prefix_tree.why_not(tiny_policy()) == ""
    unlimited = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None))
    assert prefix_tree.why_not(Policy(unlimited, is_adapter=False)) == ""
    limited = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64))
    assert "sliding_window" in prefix_tree.why_not(Policy(limited, is_adapter=False))
    mixed = GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2, head_dim=8))
    assert "sliding_attention" in prefix_tree.why_not(Policy(mixed, is_adapter=False))


@pytest.mark.parametrize("louder", [1, 100])
def test_rounding_is_no_reason_however_large_the_logits(louder: int):
    policy = tiny_policy()
    policy.model.bfloat16()
    policy.model.get_output_embeddings().weight.data *= louder
    assert prefix_tree.why_not(policy) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_ignores_the_mask_is_found_out_by_trying(dtype: torch.dtype):
    """Its configuration says nothing: a window of which the configuration does not tell."""
    policy = tiny_policy()
    policy.model.to(dtype)
    policy.model.register_forward_pre_hook(
        lambda _module, args, options: (args, options | {"segments": (), "position_ids": None}),
        with_kwargs=True,
    )
    assert "differ" in prefix_tree.why_not(policy)


def test_eager_attention_takes_it_too():
    policy = tiny_policy()
    policy.model.config.get_text_config()._attn_implementation = "eager"
    assert prefix_tree.why_not(policy) == ""


def test_a_token_is_stuck_where_the_student_is_sure_and_its_teacher_against_it(rollouts):
    """No other token is, and none that does not count: the first two are skipped here."""
    made = work(
        samples_of(rollouts, [1.0, 0.5, 0.5, 0.0], [hint_for(rollouts[1], 0)], skip_first=2),
        FeedbackSettings(),
    )
    branches = packing.pad_branches(made.hinted)
    written = torch.nn.functional.one_hot(branches.tokens_GN, made.policy.model.config.vocab_size).float()
    sure, against = 30.0 * written, -30.0 * written
    sure[:, 5:] = 0.0  # the rest in doubt
    against[:, 4] = 30.0 * written[:, 4]
    trainer.targeted(made, made.hinted, sure.requires_grad_(), against, branches)
    assert branches.weight_GN[0].tolist()[:6] == [0, 0, 1, 1, 1, 1]
    assert made.metrics.means()["stuck_tokens"] == 2
