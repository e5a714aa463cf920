"""Packing, the update and the warm-up on a tiny real model and real attempts in a real sandbox."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import tiny_environment
from scripted import calc_task, renderer
from tiny_training import (
    HINT,
    compiled,
    four_attempts,
    hint_for,
    hinted_sample,
    last_norm,
    samples_of,
    step,
    tiny_policy,
    trainer_of,
    verdicts,
)
from transformers import Gemma2Config, Gemma2ForCausalLM

from woodshed.agent import AgentSettings
from woodshed.engines.local import LocalEngine
from woodshed.experience import Collector, RolloutSettings
from woodshed.experience.compile import compile_samples, rollout_sample
from woodshed.experience.samples import TrainingSample, student_view, teacher_view
from woodshed.learning import packing
from woodshed.learning.logprobs import Predictions, token_logps
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.optimizer import OptimizerSettings, learning_rate
from woodshed.learning.policy import Policy
from woodshed.records import Group, Hint, RecipeError, Rollout, RunError
from woodshed.runs.folder import RunDir
from woodshed.stages.recipe import Recipe, TaskSettings
from woodshed.stages.task_sets import task_sets
from woodshed.tasks import folder


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    return four_attempts(tmp_path_factory.mktemp("tasks"))


def views(sample: TrainingSample) -> tuple[TrainingSample, TrainingSample]:
    """What the student and the teacher read of the sample's only branch."""
    (branch,) = sample.branches
    return student_view(sample, branch), teacher_view(sample, branch)


def hints_of(samples: Sequence[TrainingSample]) -> list[Hint]:
    return [branch.hint for sample in samples for branch in sample.branches]


# --- packing ------------------------------------------------------------------------------------------------------


def test_a_row_is_the_rollout_and_wants_exactly_the_sampled_tokens(rollouts):
    row = rollout_sample(rollouts[1])
    assert row.ids == rollouts[1].segments[0].token_ids
    sampled = [i for turn in rollouts[1].turns for i in turn.sampled_ids]
    assert [row.ids[i] for i in row.predicted] == sampled


def test_a_message_of_one_token_is_wanted(rollouts):
    """The label shift must not lose the first token of a turn (torchtitan#2755, verl#3287)."""
    turn = replace(rollouts[0].turns[0], sampled_ids=(7,), logps=(-1.0,))
    padded = packing.pad([rollout_sample(replace(rollouts[0], turns=(turn,)))])
    assert padded.tokens_BN.tolist() == [[7]] and padded.mask_BN.tolist() == [[1.0]]
    assert padded.predict_BN.tolist() == [[len(turn.context_ids) - 1]]


def test_a_reminder_stands_right_before_the_tokens_that_open_the_message(rollouts):
    message = renderer().hint(HINT)
    row = rollout_sample(rollouts[1], reminders={1: message})
    turn = rollouts[1].turns[1]
    opening = turn.context_ids[-turn.opening :]
    start = row.predicted[len(rollouts[1].turns[0].sampled_ids)]
    assert row.ids[start - len(opening) : start] == opening
    assert row.ids[start - len(opening) - len(message) : start - len(opening)] == tuple(message)
    assert len(row.ids) == len(rollouts[1].segments[0].token_ids) + len(message)


def test_student_and_teacher_want_the_same_tokens_and_differ_by_the_hint(rollouts):
    student, teacher = views(hinted_sample(rollouts[3], hint_for(rollouts[3], 1)))
    predicted = [[view.ids[i] for i in view.predicted] for view in (student, teacher)]
    assert predicted[0] == predicted[1] == list(rollouts[3].turns[1].sampled_ids)
    assert len(teacher.ids) - len(student.ids) == len(renderer().hint(HINT))
    assert student.ids == rollouts[3].segments[0].token_ids[: len(student.ids)]
    assert student.logps == rollouts[3].turns[1].logps


def test_a_whole_rollout_is_wanted_after_a_message_before_its_first_turn(rollouts):
    sample = hinted_sample(rollouts[3], hint_for(rollouts[3], 0), scope="rollout", skip_first=2)
    (branch,) = sample.branches
    student, teacher = views(sample)
    message = tuple(renderer().hint(HINT))
    first = rollouts[3].turns[0]
    cut = len(first.context_ids) - first.opening
    whole = rollouts[3].segments[0].token_ids
    assert student.ids == whole and branch.position == cut
    assert teacher.ids == (*whole[:cut], *message, *whole[cut:])
    predicted = [[view.ids[i] for i in view.predicted] for view in (student, teacher)]
    assert predicted[0] == predicted[1] == [i for turn in rollouts[3].turns for i in turn.sampled_ids]
    assert branch.weights.count(0.0) == 2 * len(rollouts[3].turns)


def test_attempts_that_say_nothing_about_the_policy_are_left_out_of_the_baseline(rollouts):
    judged = verdicts(rollouts, [1.0, 0.0, 0.0, 0.0])
    judged[rollouts[3].id] = replace(judged[rollouts[3].id], status="invalid")
    lost = replace(rollouts[2], ended="sandbox_lost")
    group = Group("t", (rollouts[0], rollouts[1], lost, rollouts[3]))
    samples = compile_samples([group], judged, [hint_for(rollouts[3], 1)], renderer()).samples
    assert [set(sample.advantages) for sample in samples] == [{0.5}, {-0.5}]
    assert not any(sample.branches for sample in samples)


def test_a_group_of_equal_rewards_is_not_computed_but_counts(rollouts):
    equal = samples_of(rollouts, [0.1] * 4)
    assert len(equal) == 4 and not any(sample.has_advantage for sample in equal)
    for kl_coef, trained in ((0.0, 0), (0.1, 4)):
        metrics = step(tiny_policy(), equal, loss=LossSettings(kl_coef=kl_coef))
        assert metrics["trained_rollouts"] == trained
    differ = samples_of(rollouts[:2], [1.0, 0.0])
    others = [replace(sample, rollout_id=f"other-{n}") for n, sample in enumerate(equal)]
    alone, beside = (step(tiny_policy(), samples) for samples in (differ, (*differ, *others)))
    assert beside["rl_loss"] == pytest.approx(alone["rl_loss"] * 2 / 6)


def test_rows_know_the_group_whose_mean_is_their_baseline(rollouts):
    groups = [Group("a", tuple(rollouts[:2])), Group("b", tuple(rollouts[2:]))]
    graded = verdicts(rollouts, [1.0, 0.0, 0.5, 0.5])
    flagged = {rollouts[0].id}
    samples = compile_samples(groups, graded, (), renderer(), flagged_ids=flagged).samples
    assert [(sample.rollout_id, sample.group, sample.rl_weights[0]) for sample in samples] == [
        (made.id, *rest)
        for made, rest in zip(rollouts, ((0, 0.0), (0, 1.0), (1, 1.0), (1, 1.0)), strict=True)
    ]


def test_every_targeted_turn_leaves_a_lesson_in_its_own_order(rollouts):
    """Student's log-probs are the policy's own, and the mean of the divergences is the loss that was taken."""
    hints = [hint_for(rollouts[3], 1), hint_for(rollouts[1], 0)]
    metrics = step(
        tiny_policy(), samples_of(rollouts, [0.0] * 4, hints), feedback=FeedbackSettings(target_floor=1)
    )
    token_divergences = {(taught.rollout_id, taught.turn): taught for taught in metrics["divergences"]}
    assert set(token_divergences) == {(rollouts[3].id, 1), (rollouts[1].id, 0)}
    for made, turn in ((rollouts[3], 1), (rollouts[1], 0)):
        taught = token_divergences[made.id, turn]
        assert taught.student == pytest.approx(made.turns[turn].logps, rel=2e-3, abs=2e-4)
        assert len(taught.teacher) == len(taught.divergence) == len(made.turns[turn].sampled_ids)
        assert taught.detector == "unknown_tool" and min(taught.divergence) > -1e-6
    means = [sum(taught.divergence) / len(taught.divergence) for taught in token_divergences.values()]
    assert sum(means) / 2 == pytest.approx(metrics["kl_loss"], rel=1e-2)
    gains = [taught.gain for taught in token_divergences.values()]
    assert sum(gains) / 2 == pytest.approx(metrics["hint_gain"], abs=1e-3)


def test_faulty_turns_stay_in_the_policy_gradient(rollouts):
    samples = samples_of(rollouts, [1.0, 0.0, 0.0, 0.0])
    assert sum(len(sample.predicted) for sample in samples if all(sample.rl_weights)) == sum(
        len(turn.sampled_ids) for r in rollouts for turn in r.turns
    )


def test_hints_that_cannot_be_trained_on_are_left_out_and_counted(rollouts):
    """Never a silent zero: each is counted under its reason."""
    cut = replace(rollouts[2].turns[1], finish_reason="length")
    changed = [*rollouts[:2], replace(rollouts[2], turns=(rollouts[2].turns[0], cut)), rollouts[3]]
    hints = [
        hint_for(rollouts[0], 0),
        hint_for(rollouts[1], 0, text=""),
        hint_for(rollouts[1], 1, text="Reminder: " + "much to say " * 300),
        hint_for(changed[2], 1),
        replace(hint_for(changed[2], 1), detector="truncated"),
        replace(hint_for(rollouts[0], 0), rollout_id="lost"),
    ]
    room = len(views(hinted_sample(rollouts[0], hints[0]))[1].ids) + 300
    made = compiled(changed, [0.0] * 4, hints, context_length=room)
    assert hints_of(made.samples) == [hints[0], hints[4]]
    assert made.skipped_hints == {
        "empty hint": 1,
        "no room for the hint": 1,
        "the turn was cut": 1,
        "attempt not trainable": 1,
    }
    everything = compiled(rollouts, [0.0] * 4, hints[:1], skip_first=500)
    assert hints_of(everything.samples) == [] and everything.skipped_hints == {"no token counts": 1}


def test_tokens_that_do_not_count_take_no_part_in_the_divergence(rollouts):
    hint = hint_for(rollouts[1], 0)
    first = hinted_sample(rollouts[1], hint, skip_first=3).branches[0].weights
    assert first[:3] == (0.0,) * 3 and all(first[3:])


def test_a_penalty_is_taken_off_the_reward_before_the_mean(rollouts):
    samples = samples_of(rollouts, [1.0, 1.0, 0.0, 0.0], reward_terms={rollouts[0].id: -0.2})
    assert [s.advantages[0] for s in samples] == pytest.approx([0.35, 0.55, -0.45, -0.45])


def test_targets_beyond_the_limit_are_thinned_evenly(rollouts):
    hints = [hint_for(r, t) for r in rollouts for t in range(3)]
    samples = samples_of(rollouts, [0.0] * 4, hints, max_branches=4)
    assert hints_of(samples) == [hints[i] for i in (0, 3, 6, 9)]


@pytest.mark.parametrize(("split", "positions"), [(packing.by_length, max), (packing.first_fit, sum)])
def test_micro_batches_hold_every_sample_once_and_respect_the_budget(split, positions):
    rng = random.Random(0)
    lengths = [rng.randint(2, 90) for _ in range(50)] + [300]
    batches = split(range(51), lengths, 200)
    assert sorted(i for batch in batches for i in batch) == list(range(51)) and [50] in batches
    for batch in batches:
        used = [lengths[i] for i in batch]
        assert positions(used) * (len(used) if positions is max else 1) <= 200 or batch == [50]


def test_first_fit_needs_fewer_micro_batches_than_rows_in_order_of_length():
    """Rollouts a little longer than half the budget, and short ones that fit beside them."""
    lengths = [1100 + 7 * n for n in range(18)] + [600 + 9 * n for n in range(18)]
    batches = [split(lengths, lengths, 2048) for split in (packing.by_length, packing.first_fit)]
    assert [len(each) for each in batches] == [26, 18]


# --- the policy ---------------------------------------------------------------------------------------------------


def test_sampler_and_trainer_agree_on_every_token_of_real_attempts(tmp_path):
    policy = tiny_policy(rank=4)
    tasks = [calc_task(tmp_path / name, tiny_environment()) for name in ("a", "b")]
    sampler = LocalEngine(policy.model, renderer())
    agent = AgentSettings(max_turns=4, turn_tokens=24, rollout_tokens=80)
    groups = Collector(sampler, RolloutSettings(max_in_flight=8), agent).collect(tasks, attempts=3)
    rows = [rollout_sample(r) for group in groups for r in group.rollouts]
    assert sum(len(row.predicted) for row in rows) > 100
    padded = packing.pad(rows)
    right = token_logps(policy.logits(padded), padded.tokens_BN, 1.0)
    gap = ((right - padded.logp_sampler_BN) * padded.mask_BN).abs().max()
    assert gap <= 1e-3

    length = padded.ids_RT.shape[1]  # the same rows padded on the left
    ids = torch.zeros_like(padded.ids_RT)
    mask = torch.zeros_like(padded.ids_RT)
    for b, row in enumerate(rows):
        ids[b, length - len(row.ids) :] = torch.tensor(row.ids)
        mask[b, length - len(row.ids) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = policy.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    for b, row in enumerate(rows):
        index = torch.tensor(row.predicted) + length - len(row.ids)
        left = logits[b, index - 1].log_softmax(-1).gather(-1, ids[b, index, None])[:, 0]
        assert (left - torch.tensor(row.logps)).abs().max() <= 1e-3


def test_the_frozen_teacher_is_swapped_in_and_out_without_a_trace(rollouts):
    policy = tiny_policy()
    padded = packing.pad([rollout_sample(rollouts[0])])
    start = policy.snapshot()
    before = policy.logits(padded)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.05)
    changed = policy.logits(padded)
    with policy.using(start):
        assert torch.equal(policy.logits(padded), before)
    assert torch.equal(policy.logits(padded), changed) and not torch.equal(changed, before)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1 << 25, 50])
def test_log_probs_and_their_gradients_are_those_of_the_cross_entropy(
    temperature, dtype, at_once, monkeypatch
):
    monkeypatch.setattr("woodshed.learning.logprobs.ELEMENTS_AT_ONCE", at_once)
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 37, generator=rng).to(dtype).requires_grad_()
    tokens, weights = torch.randint(37, (3, 5), generator=rng), torch.randn(3, 5, generator=rng)
    found = token_logps(logits, tokens, temperature)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    flat = (logits.float() / temperature).flatten(0, 1)
    right = -torch.nn.functional.cross_entropy(flat, tokens.flatten(), reduction="none").view(3, 5)
    (wanted,) = torch.autograd.grad((right * weights).sum(), logits)
    assert torch.allclose(found, right, atol=1e-6) and found.dtype == torch.float32
    assert torch.allclose(gradient, wanted, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1 << 25, 50])
@pytest.mark.parametrize("trained", [False, True])
def test_a_reading_scores_as_the_cross_entropy_does(temperature, dtype, at_once, trained, monkeypatch):
    monkeypatch.setattr("woodshed.learning.logprobs.ELEMENTS_AT_ONCE", at_once)
    rng = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(8, 37).to(dtype).requires_grad_(trained)
    hidden = torch.randn(3, 5, 8, generator=rng).to(dtype).requires_grad_()
    tokens, weights = torch.randint(37, (3, 5), generator=rng), torch.randn(3, 5, generator=rng)
    found, entropy = Predictions(hidden, head).score(tokens, temperature)
    taught = [hidden, *head.parameters()] if trained else [hidden]
    gradients = torch.autograd.grad((found * weights).sum(), taught)
    flat = (head(hidden).float() / temperature).flatten(0, 1)
    right = -torch.nn.functional.cross_entropy(flat, tokens.flatten(), reduction="none").view(3, 5)
    wanted = torch.autograd.grad((right * weights).sum(), taught)
    exact = dtype == torch.float32
    assert torch.allclose(found, right, atol=1e-6) and found.dtype == torch.float32
    oracle = torch.distributions.Categorical(logits=flat).entropy().view(3, 5)
    assert torch.allclose(entropy, oracle, atol=1e-5) and not entropy.requires_grad
    for gradient, of_loss in zip(gradients, wanted, strict=True):
        assert torch.allclose(gradient, of_loss, atol=1e-5 if exact else 2e-2) and gradient.dtype == dtype


def test_no_logits_are_kept_for_the_backward_pass_under_a_frozen_head(rollouts):
    policy = tiny_policy(rank=4)
    padded = packing.pad([rollout_sample(r) for r in rollouts])
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape), t)[1], lambda t: t):
        reading = policy.forward(padded)
        reading.score(padded.tokens_BN, 1.0)
    wide = reading.logits().numel()
    assert kept and max(shape.numel() for shape in kept if len(shape) != 2) < wide
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape), t)[1], lambda t: t):
        token_logps(reading.logits(), padded.tokens_BN, 1.0)
    assert max(shape.numel() for shape in kept) >= wide


def test_a_model_that_caps_its_logits_is_read_as_it_answers():
    torch.manual_seed(0)
    config = Gemma2Config(vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 8
    config.final_logit_softcapping = 0.5
    model = Gemma2ForCausalLM(config)
    policy = Policy(model, is_adapter=False)
    ids = torch.randint(60, (2, 9))
    padded = packing.pad([TrainingSample(tuple(row), (4, 7, 8), (0.0,) * 3) for row in ids.tolist()])
    whole = model(input_ids=ids).logits[:, [3, 6, 7]]
    assert whole.abs().max() <= 0.5
    assert torch.allclose(policy.logits(padded), whole, atol=1e-6)
    right = whole.log_softmax(-1).gather(-1, padded.tokens_BN.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(policy.logps(padded, 1.0), right, atol=1e-6)


def test_an_adapter_is_kept_in_float32_and_multiplied_in_the_models_precision():
    policy = tiny_policy()
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    layer = policy.model.base_model.model.model.layers[0].mlp.down_proj
    kept: list[torch.Tensor] = []
    x = torch.randn(2, 3, 96, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out = layer(x)
    assert {t.dtype for t in kept if t.numel() == x.numel()} == {torch.bfloat16}
    out.float().sum().backward()
    matrices = [layer.lora_A.default.weight, layer.lora_B.default.weight]
    assert all(each.dtype == each.grad.dtype == torch.float32 for each in matrices)
    x, out, (a, b) = x.detach(), out.detach(), (each.detach() for each in matrices)
    plain = x.float() @ layer.base_layer.weight.float().T
    right = plain + 2 * x.float() @ a.T @ b.T
    assert torch.allclose(out.float(), right, atol=0.05 * float(right.abs().max()))
    assert not torch.allclose(out.float(), plain, atol=0.05 * float(right.abs().max()))


def test_an_adapter_on_a_model_of_lower_precision_is_rounded_once_a_step_and_not_in_every_forward():
    """The same numbers as when it is converted in every forward; what is trained and exported stays exact."""
    model = tiny_policy().model
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            parameter.data = parameter.data.bfloat16()
    exact = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    batch = packing.pad([TrainingSample(tuple(range(1, 20)), tuple(range(5, 19)))])

    def forward() -> tuple[torch.Tensor, int]:
        """Logits, and conversions on the way."""
        with torch.no_grad(), torch.profiler.profile() as profile:
            logits = model(input_ids=batch.ids_RT).logits
        return logits, sum(event.name == "aten::_to_copy" for event in profile.events() or ())

    right, before = forward()
    policy = Policy(model, is_adapter=True)
    logits, after = forward()
    assert torch.equal(logits, right) and before - after == len(exact)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.bfloat16}
    assert all(torch.equal(policy.trainable[name], value) for name, value in exact.items())
    policy.find_weights()  # again, as after a layout was applied: the masters stay
    assert all(torch.equal(policy.trainable[name], value) for name, value in exact.items())
    assert all(
        torch.equal(value, exact[names[0]]) for names, value in policy.whole_weights() if names[0] in exact
    )
    policy.logps(batch, 1.0).sum().backward()
    assert all(
        each.grad is not None and each.grad.dtype == torch.float32 for each in policy.trainable.values()
    )
    with policy.using({name: torch.zeros_like(value) for name, value in exact.items()}), torch.no_grad():
        assert not torch.equal(model(input_ids=batch.ids_RT).logits, right)
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch.ids_RT).logits, right)


def test_only_the_adapter_is_trained():
    policy = tiny_policy()
    assert policy.trainable and all("lora_" in name for name in policy.trainable)


# --- the update ---------------------------------------------------------------------------------------------------


def test_without_hints_the_targeted_loss_is_exactly_zero(rollouts):
    metrics = step(tiny_policy(), samples_of(rollouts, [1.0, 0.0, 0.0, 0.0]))
    assert metrics["kl_loss"] == 0.0 and metrics["kl_grad_norm"] == 0.0 and metrics["targets"] == 0
    emptied = [hint_for(rollouts[1], 0, text="")]
    assert step(tiny_policy(), samples_of(rollouts, [0.0] * 4, emptied))["kl_loss"] == 0.0


def test_with_a_hint_the_targeted_loss_is_not_zero(rollouts):
    metrics = step(tiny_policy(), samples_of(rollouts, [0.0] * 4, [hint_for(rollouts[1], 0)]))
    assert metrics["kl_loss"] > 0 and metrics["kl_grad_norm"] > 0 and metrics["rl_grad_norm"] == 0


def test_a_teacher_that_sees_what_the_student_sees_gives_exactly_no_gradient(rollouts):
    policy = tiny_policy()
    sample = hinted_sample(rollouts[1], hint_for(rollouts[1], 0))
    (branch,) = sample.branches
    same = replace(
        sample, branches=(replace(branch, ids=sample.ids[branch.position : branch.predicted[-1] + 1]),)
    )
    for forward, rounding in (("separate", 0.0), ("packed", 1e-7)):
        feedback = FeedbackSettings.model_validate({"teacher": "live", "forward": forward})
        metrics = step(policy, [same], feedback=feedback)
        assert abs(metrics["kl_loss"]) <= rounding and metrics["kl_grad_norm"] < 1e-6


def test_the_targeted_loss_reads_the_targeted_turn_and_its_past_only(rollouts):
    hint = hint_for(rollouts[3], 1)
    sample = hinted_sample(rollouts[3], hint)
    student, teacher_reads = views(sample)
    later = replace(rollouts[3].turns[2], sampled_ids=(5, 6, 7), logps=(0.0, 0.0, 0.0))
    changed = replace(rollouts[3], turns=(*rollouts[3].turns[:2], later))
    assert views(hinted_sample(changed, hint)) == (student, teacher_reads)
    start = len(student.ids) - len(rollouts[3].turns[1].sampled_ids)
    assert student.predicted == tuple(range(start, len(student.ids)))

    policy = tiny_policy()
    trainer, seen = trainer_of(policy), []
    hook = last_norm(policy).register_forward_hook(
        lambda _module, _inputs, hidden: (
            hidden.retain_grad() if hidden.requires_grad else None,
            seen.append(hidden),
        )[1]
    )
    trainer.step([sample])
    hook.remove()
    of_teacher, of_student = seen
    assert not of_teacher.requires_grad and of_teacher.grad_fn is None
    taught = of_student.grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert taught == [i - 1 for i in student.predicted]


def test_feedback_of_weight_zero_equals_rl_alone_bit_for_bit(rollouts):
    plain, zero = tiny_policy(), tiny_policy()
    step(plain, samples_of(rollouts, [1.0, 0.0, 0.0, 0.0]))
    hinted = samples_of(rollouts, [1.0, 0.0, 0.0, 0.0], [hint_for(rollouts[1], 0)])
    step(zero, hinted, feedback=FeedbackSettings(weight=0.0))
    for name, parameter in plain.trainable.items():
        assert torch.equal(parameter, zero.trainable[name])


def test_the_update_does_not_depend_on_the_micro_batch_split(rollouts):
    batch = samples_of(rollouts, [1.0, 0.0, 0.0, 0.3], [hint_for(rollouts[1], 0), hint_for(rollouts[3], 1)])
    gradients = []
    for tokens in (100, 100_000):
        policy = tiny_policy()
        metrics = step(policy, batch, loss=LossSettings(micro_batch_tokens=tokens))
        gradients.append(
            (metrics["rl_grad_norm"], metrics["kl_grad_norm"], metrics["rl_loss"], metrics["kl_loss"])
        )
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-4)


def test_the_targeted_gradient_never_outgrows_the_policy_gradient(rollouts):
    batch = samples_of(rollouts, [1.0, 0.0, 0.0, 0.0], [hint_for(rollouts[1], 0), hint_for(rollouts[3], 1)])
    metrics = step(tiny_policy(), batch, feedback=FeedbackSettings(weight=1000.0))
    assert metrics["kl_grad_norm"] > metrics["rl_grad_norm"]
    assert metrics["kl_factor"] / 1000.0 * metrics["kl_grad_norm"] == pytest.approx(
        metrics["rl_grad_norm"], rel=1e-4
    )


def test_policy_gradient_makes_the_rewarded_attempt_likelier_than_the_others(rollouts):
    policy = tiny_policy()
    padded = packing.pad([rollout_sample(r) for r in rollouts])

    def sums():
        logps = token_logps(policy.logits(padded), padded.tokens_BN, 1.0).detach()
        return (logps * padded.mask_BN).sum(-1)

    before = sums()
    step(policy, samples_of(rollouts, [1.0, 0.0, 0.0, 0.0]), rate=1e-3, steps=3)
    gain = sums() - before
    assert gain[0] > 0 and gain[0] > gain[1:].max()


def test_training_on_hints_lowers_the_unhinted_probability_of_the_faulty_turn(rollouts):
    """The policy is taught to err without and to be right with a reminder; then hints alone un-teach the error."""
    policy = tiny_policy(rank=0)
    wrong, right = rollouts[1], rollouts[0]
    hinted_right = replace(right.turns[0], context_ids=wrong.turns[0].context_ids)
    rows = [
        rollout_sample(replace(wrong, turns=wrong.turns[:1])),
        rollout_sample(replace(right, turns=(hinted_right,)), reminders={0: renderer().hint(HINT)}),
    ]
    padded = packing.pad(rows)
    optimizer = torch.optim.AdamW(policy.trainable.values(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        logps = token_logps(policy.logits(padded), padded.tokens_BN, 1.0)
        (-(logps * padded.mask_BN).sum() / padded.mask_BN.sum()).backward()
        optimizer.step()

    sample = hinted_sample(wrong, hint_for(wrong, 0))
    student, teacher = (packing.pad([view]) for view in views(sample))

    def logp(view):
        return float(token_logps(policy.logits(view), view.tokens_BN, 1.0).sum().detach())

    assert logp(student) > -1.0 and logp(teacher) < logp(student) - 2.0  # it errs, and the hint helps
    before = logp(student)
    step(policy, [sample], rate=1e-3, steps=12)
    assert logp(student) < before - 1.0


def test_a_gradient_that_is_not_finite_takes_no_step_and_says_so(rollouts):
    """Some engines return NaN log-probs (trl#6266)."""
    policy = tiny_policy()
    before = policy.snapshot()
    turn = rollouts[0].turns[0]
    broken = replace(turn, logps=(float("nan"),) * len(turn.logps))
    spoiled = [replace(rollouts[0], turns=(broken, *rollouts[0].turns[1:])), *rollouts[1:]]
    with pytest.raises(RecipeError, match="no step was taken"):
        step(policy, samples_of(spoiled, [1.0, 0.0, 0.0, 0.0]))
    assert all(torch.equal(p, before[n]) for n, p in policy.trainable.items())


def test_a_backward_pass_that_breaks_now_and_then_loses_its_step_and_no_more(rollouts):
    """cuDNN's attention gave a NaN gradient for a finite loss, and every weight was NaN after the step."""
    policy, batch = tiny_policy(), samples_of(rollouts, [1.0, 0.0, 0.0, 0.0])
    before = policy.snapshot()
    breaks = next(iter(policy.trainable.values())).register_hook(lambda grad: grad * float("nan"))
    assert step(policy, batch, steps=2)["lost"] == 2
    with pytest.raises(RecipeError, match="no step was taken"):
        step(policy, batch, steps=3)
    assert all(torch.equal(p, before[n]) for n, p in policy.trainable.items())
    breaks.remove()
    assert step(policy, batch)["lost"] == 0
    assert not all(torch.equal(p, before[n]) for n, p in policy.trainable.items())


def test_a_reward_that_is_not_a_number_is_refused_by_name(rollouts):
    with pytest.raises(RunError, match="train-0-calc-0 has reward nan"):
        samples_of(rollouts, [float("nan"), 0.0, 0.0, 0.0])


def test_a_step_without_any_signal_leaves_the_weights_alone(rollouts):
    policy = tiny_policy()
    step(policy, samples_of(rollouts, [1.0, 0.0, 0.0, 0.0]))
    before = policy.snapshot()
    step(policy, samples_of(rollouts, [0.0] * 4))
    assert all(torch.equal(p, before[n]) for n, p in policy.trainable.items())


def test_learning_rate_rises_holds_and_falls():
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=2, decay_share=0.5)
    rates = [learning_rate(settings, step, 8) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_an_exported_adapter_loads_in_peft_with_the_same_logits(rollouts, tmp_path: Path):
    from peft import PeftModel

    policy = tiny_policy()
    step(policy, samples_of(rollouts, [1.0, 0.0, 0.0, 0.0]))
    policy.export(tmp_path / "adapter")
    base = tiny_policy(rank=0).model
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        model = PeftModel.from_pretrained(base, str(tmp_path / "adapter"), is_trainable=True)
    loaded = Policy(model, is_adapter=True)
    padded = packing.pad([rollout_sample(rollouts[0])])
    assert torch.allclose(loaded.logits(padded), policy.logits(padded), atol=1e-5)


def test_a_share_of_the_tasks_is_held_out_by_id_and_kept_by_the_run(tiny_task, tmp_path):
    workspace = tiny_task.folder / "environment" / "workspace"
    tests, gold = folder.protected_files(tiny_task), folder.gold_patch(tiny_task).files
    for n in range(5):
        other = replace(tiny_task, name=f"tally-{n}", provenance={"source": f"repository-{n}"})
        new = {path: text.encode() for path, text in gold.items() if text is not None}
        folder.write(other, tmp_path / "tasks" / other.name, workspace=workspace, tests=tests, gold=new)
    chosen = Recipe(name="sets", tasks=TaskSettings(train=(tmp_path / "tasks",), heldout_share=0.4))
    run = RunDir.create(tmp_path / "run", recipe=chosen.to_toml(), manifest={})
    practice, heldout = task_sets(chosen, run)
    ids = sorted(task.id for task in folder.load_set(tmp_path / "tasks"))
    assert sorted(task.id for task in heldout) == ids[:2] and sorted(task.id for task in practice) == ids[2:]
    shutil.rmtree(tmp_path / "tasks")
    assert task_sets(chosen, run) == (practice, heldout)
    run.unlock()
