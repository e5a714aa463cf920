"""Experts that an engine chose, told by its routers and replayed by the trainer's, on real mixtures of experts."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from parallel_models import VOCAB, build
from torch import Tensor

from woodshed.engines import expert_log
from woodshed.engines.engine import SampleRequest, sample_all
from woodshed.engines.local import LocalEngine, routing
from woodshed.engines.local.routing import routers_of
from woodshed.experience.samples import HintBranch, TrainingSample, student_view, teacher_view
from woodshed.learning import packing
from woodshed.learning.policy import Policy
from woodshed.learning.router_replay import refilled
from woodshed.records import Hint, Turn

IDS = tuple(torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist())
FAMILIES = ("qwen", "deepseek")


def told(model: Any, ids: tuple[int, ...] = IDS) -> np.ndarray:
    """(T, L, K) of what the model's routers choose."""
    with torch.no_grad(), routers_of(model).told() as chosen:
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return torch.stack(chosen, 1).numpy()


def sample(*parts: tuple[int, np.ndarray]) -> TrainingSample:
    experts = tuple(expert_log.write(*part) for part in parts)
    return TrainingSample(IDS, tuple(range(1, len(IDS))), experts=experts)


def logps(policy: Policy, read: TrainingSample) -> Tensor:
    return policy.logps(packing.pad([read]), 1.0)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_tell_what_the_experts_get(family: str):
    model, seen = build(family), []
    for name, experts in routing.find_experts(model).items():
        experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
        assert "experts" in name
    chosen = told(model)
    assert chosen.shape == (len(IDS), len(seen), 4)
    assert all((torch.as_tensor(chosen[:, n]) == each).all() for n, each in enumerate(seen))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_another_precision_are_replayed(family: str):
    """The engine computes in bfloat16: with its experts the trainer's log-probs are as close as rounding lets them,
    and gate scores carry gradients."""
    model = build(family)
    policy, engine = Policy(model, is_adapter=False), copy.deepcopy(model).to(torch.bfloat16)
    own, chosen = told(model), told(engine)
    assert (own != chosen).any(), "the precisions agree: the toy shows nothing"
    seen: list[Tensor] = []
    for experts in routing.find_experts(model).values():
        experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    logps(policy, sample((0, chosen))).sum().backward()
    assert all((torch.as_tensor(chosen[:, n]) == each).all() for n, each in enumerate(seen))
    gates = [weight for name, weight in model.named_parameters() if name.endswith("gate.weight")]
    assert gates and all(float(weight.grad.abs().max()) > 0 for weight in gates if weight.grad is not None)
    assert policy.replay.take_counts() == (float(chosen.size), 0.0)
    assert torch.equal(logps(policy, sample()), logps(policy, sample((0, own)))), (
        "its own experts change nothing"
    )


def test_what_cannot_have_been_the_engines_is_refilled_from_the_routers_own():
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.1, 0.05]]).expand(6, -1)
    logged = torch.tensor([[0, 1], [3, 2], [2, 2], [-1, -1], [5, 3], [4, 5]])
    chosen, is_kept = refilled(scores, logged, torch.tensor([[1, 0]]).expand(6, -1))
    assert chosen.tolist() == [[0, 1], [3, 2], [2, 0], [1, 0], [0, 3], [1, 0]]
    assert is_kept.tolist() == [
        [True] * 2,
        [True] * 2,
        [True, False],
        [False] * 2,
        [False, True],
        [False] * 2,
    ]
    ruled_out = scores.masked_fill(scores < 0.65, -torch.inf)
    assert refilled(ruled_out, logged, logged)[0][1].tolist() == [0, 2], (
        "no expert of a group that is ruled out"
    )


def test_a_log_of_another_shape_is_not_replayed():
    model = build("qwen")
    policy, own = Policy(model, is_adapter=False), told(model)
    other = (own + 1) % 16
    expected = logps(policy, sample())
    for odd in (other[:, :1], other[:, :, :3], np.concatenate([other, other], 1)):
        assert torch.equal(logps(policy, sample((0, odd))), expected)
    damaged = replace(expert_log.write(0, other), shape=(99, 2, 4))
    assert torch.equal(logps(policy, replace(sample(), experts=(damaged,))), expected)


def test_a_log_of_all_layers_counts_those_with_experts():
    """DeepSeek's first layer is dense; an engine may tell of it too."""
    model = build("deepseek")
    policy, chosen = Policy(model, is_adapter=False), told(copy.deepcopy(model).to(torch.bfloat16))
    all_layers = np.concatenate([np.zeros_like(chosen), chosen], 1)
    assert torch.equal(logps(policy, sample((0, all_layers))), logps(policy, sample((0, chosen))))


def test_the_first_turn_that_names_a_token_is_what_later_ones_saw():
    first, later = np.full((10, 2, 4), 1), np.full((20, 2, 4), 2)
    padded = packing.pack([sample(), sample((2, first), (5, later))])
    assert padded.experts_RTLK is not None
    known = padded.experts_RTLK[0, :, 0, 0].tolist()
    assert known == [-1] * 40 + [-1, -1, *[1] * 10, *[2] * 13, *[-1] * 15]
    assert packing.pad([sample()]).experts_RTLK is None


def test_a_turn_tells_what_earlier_ones_did_not():
    turn = Turn((1, 2, 3), 0, (4, 5), (0.0, 0.0), (), "stop", "", (), (), None)
    whole = expert_log.write(0, np.arange(9 * 2 * 4).reshape(9, 2, 4) % 16)
    earlier = replace(turn, experts=expert_log.untold(whole, []))
    rest = expert_log.untold(whole, [earlier])
    assert rest is not None and rest.start == 4, "the last token of a message is read by the next turn"
    assert (expert_log.read(rest) == expert_log.read(whole)[4:]).all()
    assert expert_log.untold(whole, [turn]) is whole, "a turn that told nothing"


def test_of_a_message_in_two_pieces_the_first_one_read_its_tokens():
    first, later = (expert_log.write(0, np.full((length, 2, 4), length)) for length in (3, 5))
    assert expert_log.read(expert_log.joined(first, later) or later)[:, 0, 0].tolist() == [3, 3, 3, 5, 5]
    assert expert_log.joined(None, later) is later
    assert expert_log.joined(first, expert_log.write(0, np.zeros((5, 3, 4)))) is first


def test_the_local_engine_tells_its_experts():
    """Prompts with a common beginning, rows that end apart, a beginning that is cached: what it tells is replayed
    without a choice that differs."""
    model = build("qwen")
    policy, renderer = Policy(model, is_adapter=False), SimpleNamespace(stop_ids=())
    engine: Any = LocalEngine(model, renderer, tells_experts=True)  # type: ignore[arg-type]
    asked = [SampleRequest((*IDS[:20], n), 3 + n, seed=n) for n in range(3)]
    first = sample_all(engine, asked)
    later = SampleRequest((*asked[2].prompt_ids, *first[2].ids, 7), 4, seed=0)
    for request, told_by in zip([*asked, later], [*first, *sample_all(engine, [later])], strict=True):
        ids = (*request.prompt_ids, *told_by.ids)
        assert told_by.experts is not None
        chosen, own = expert_log.read(told_by.experts), told(model, ids[:-1])
        assert chosen.shape == own.shape
        assert (np.sort(chosen) == np.sort(own)).mean() > 0.98, "but for scores that tie"
        read = TrainingSample(
            ids, tuple(range(len(request.prompt_ids), len(ids))), experts=(told_by.experts,)
        )
        gap = (logps(policy, read).detach() - torch.tensor(told_by.logps)).abs().max()
        assert float(gap) < 1e-4
    engine.close()


def test_views_keep_the_experts_of_the_tokens_that_they_share():
    branch = HintBranch(
        Hint("", 0, "", ""), 8, (1, 2, 3, *IDS[10:14]), (10, 11, 12, 13), (1.0,) * 4, ((0, 4),)
    )
    hinted = replace(sample((0, np.arange(40 * 8).reshape(40, 2, 4) % 16)), branches=(branch,))
    for view, kept in ((student_view(hinted, branch), 14), (teacher_view(hinted, branch), 8)):
        known = packing.pad([view]).experts_RTLK
        assert known is not None and (known[0] >= 0).all(-1).all(-1).tolist() == [
            n < kept for n in range(len(view.ids))
        ]
