"""Attempts in several segments: what is trained of one is what would be trained of it uncut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scripted import renderer
from test_records import ROLLOUT, TURN
from tiny_training import (
    compiled,
    feedback_of,
    four_attempts,
    hint_for,
    samples_of,
    tiny_policy,
    trainer_of,
)

from woodshed.evals import atif
from woodshed.evals.behaviour import prompt_lengths
from woodshed.experience import transcripts
from woodshed.experience.compile import hint_branch, rollout_sample, rollout_samples
from woodshed.experience.samples import student_view, teacher_view
from woodshed.learning import losses
from woodshed.learning.loss_settings import LossSettings
from woodshed.records import Rollout, Turn, Verdict
from woodshed.report.transcripts import segment_note
from woodshed.runs.folder import RunDir


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    return four_attempts(tmp_path_factory.mktemp("tasks"))


def cut(rollout: Rollout, *places: int) -> Rollout:
    """The same attempt, whose segments begin with these turns and repeat everything before them as context."""
    turns: list[Turn] = []
    for number, turn in enumerate(rollout.turns):
        if number in places:
            before = [
                i for earlier in rollout.turns[:number] for i in (*earlier.context_ids, *earlier.sampled_ids)
            ]
            turn = replace(turn, context_ids=(*before, *turn.context_ids), begins="thoughts")
        turns.append(replace(turn, segment=sum(place <= number for place in places)))
    return replace(rollout, turns=tuple(turns))


def test_segments_of_an_agent_that_calls_others_interleave():
    inner = replace(TURN, segment=1)
    turns = (TURN, replace(inner, begins="agent"), TURN, inner, inner)
    rollout = replace(ROLLOUT, turns=turns)
    assert [(s.number, s.indices, s.begins) for s in rollout.segments] == [
        (0, (0, 2), ""),
        (1, (1, 3, 4), "agent"),
    ]
    assert rollout.segments[0].token_ids == (1, 2, 3, 4, 5) * 2
    assert prompt_lengths(rollout) == [3, 3, 8, 8, 13]
    assert [segment_note(rollout, n) for n in range(5)] == [
        "",
        "segment 1 begins: the agent called another one",
        "back in segment 0",
        "back in segment 1",
        "",
    ]


def test_every_segment_is_a_sample_of_the_attempts_advantage(rollouts: list[Rollout]):
    chain = [cut(rollouts[0], 1, 2), *rollouts[1:]]
    samples = samples_of(chain, [1.0, 0.0, 0.0, 0.0])
    assert [sample.key for sample in samples] == [
        *((rollouts[0].id, n) for n in range(3)),
        *((made.id, 0) for made in rollouts[1:]),
    ]
    assert [set(sample.advantages) for sample in samples] == [{0.75}] * 3 + [{-0.25}] * 3
    whole = [
        i for sample in rollout_samples(rollouts[0]) for i in map(sample.ids.__getitem__, sample.predicted)
    ]
    assert [sample.ids[i] for sample in samples[:3] for i in sample.predicted] == whole
    assert samples[2].ids == rollouts[0].segments[0].token_ids


def test_hints_stand_in_the_segment_of_their_turn(rollouts: list[Rollout]):
    chain, hint = cut(rollouts[3], 1), hint_for(rollouts[3], 1)
    (branched,) = [s for s in samples_of([chain, *rollouts[:3]], [0.0, 1.0, 0.0, 0.0], [hint]) if s.branches]
    (branch,) = branched.branches
    assert branched.key == (chain.id, 1) and branch.spans == ((1, len(chain.turns[1].sampled_ids)),)
    uncut = rollout_sample(rollouts[3])
    expected = hint_branch(rollouts[3].segments[0], hint, renderer())
    assert student_view(branched, branch) == student_view(uncut, expected)
    assert teacher_view(branched, branch) == teacher_view(uncut, expected)
    everywhere = compiled([chain, *rollouts[:3]], [0.0, 1.0, 0.0, 0.0], [hint], scope="rollout").samples
    assert [[b.segment for b in sample.branches] for sample in everywhere[:2]] == [[0], [1]]


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_step_on_segments_is_the_step_on_the_attempt_uncut(rollouts: list[Rollout], kl_coef: float):
    """Denominators and baselines count attempts, k1 is that of the whole attempt."""
    rewards, hint = [1.0, 0.0, 0.5, 0.0], hint_for(rollouts[3], 1)
    stepped = []
    for made in (rollouts, [cut(rollouts[0], 1), rollouts[1], cut(rollouts[2], 1, 2), cut(rollouts[3], 1)]):
        policy, start = tiny_policy(), tiny_policy(seed=1).snapshot()
        trainer = trainer_of(policy, start=start, feedback=feedback_of(), loss=LossSettings(kl_coef=kl_coef))
        metrics = trainer.step(samples_of(made, rewards, [hint]))
        stepped.append((policy.snapshot(), metrics))
    (whole, before), (segments, after) = stepped
    for measured in ("rl_loss", "rl_grad_norm", "kl_grad_norm"):
        assert after[measured] == pytest.approx(before[measured], rel=1e-3), measured
    for name, value in whole.items():  # Adam's steps are of 1e-2, also where a gradient is next to nothing
        torch.testing.assert_close(segments[name], value, rtol=1e-3, atol=1e-3)


def test_k1_of_a_segment_is_that_of_its_attempt():
    logp, start, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.5]]), torch.ones(1, 2)
    others, size = torch.tensor([3.0]), torch.tensor([2.0])
    rest = torch.tensor([4.0])
    assert losses.sequence_k1(logp, start, mask, others, size, rest).tolist() == [5.0 - 8.0 / 2]


def test_segments_are_imitated_each(rollouts: list[Rollout], tmp_path: Path):
    run = RunDir.create(tmp_path / "run", recipe="", manifest={})
    run.append("rollouts", [cut(rollouts[0], 1)], "train", 0)
    verdict = Verdict(rollouts[0].id, rollouts[0].task_id, "graded", 1.0, True, {})
    run.append("verdicts", [verdict], "train", 0)
    run.unlock()
    atif.export(run, tmp_path / "atif", problems=[])
    for path in (tmp_path / "run", tmp_path / "atif"):
        made = transcripts.read(path, renderer())
        assert [(each.ids, each.imitated) for each in made] == [
            (sample.ids, sample.predicted) for sample in rollout_samples(cut(rollouts[0], 1))
        ]
