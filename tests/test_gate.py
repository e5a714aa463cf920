"""The gate's rule on figures, and the gate itself on a policy that was taught what reminders mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import tiny_environment
from scripted import EDIT, NO_ENVIRONMENT, READ, TEST, UNKNOWN, calc_task, play, renderer
from tiny_training import tiny_policy, trainer_of

from woodshed import feedback
from woodshed.agent import AgentSettings, Attempt
from woodshed.agent.tools import TOOLS
from woodshed.engines.engine import Sample
from woodshed.engines.local import LocalEngine
from woodshed.experience.compile import rollout_sample
from woodshed.feedback.gate import (
    GateBars,
    GateMeasurement,
    GateSettings,
    another_class,
    switched_off,
    why_not,
)
from woodshed.learning import hint_gate, packing
from woodshed.learning.hint_gate import Redrawing
from woodshed.learning.logprobs import token_logps
from woodshed.records import Hint
from woodshed.sandbox import SandboxSpec, open_sandbox

GOOD = GateMeasurement(
    "unknown_tool",
    20,
    {"hint": -3.0, "placebo": -0.2, "wrong": -0.5},
    1.0,
    {"plain": 12, "hint": 2, "placebo": 11, "wrong": 9},
)


def test_a_class_that_beats_placebo_and_wrong_hint_passes():
    assert why_not(GOOD) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gain": {"hint": -0.9, "placebo": 0.0, "wrong": 0.0}}, "gain -0.90 nats, not at most"),
        ({"gain": {"hint": +0.8, "placebo": -0.2, "wrong": 0.0}}, "gain +0.80 nats, not at most"),
        ({"gain": {"hint": -2.0, "placebo": -2.1, "wrong": 0.0}}, "a placebo's -2.10"),
        ({"lowered": 0.9}, "lowers 90% of turns"),
        ({"faulty": {"plain": 12, "hint": 7, "placebo": 12, "wrong": 12}}, "35% faulty, 60% without"),
        ({"faulty": {"plain": 12, "hint": 2, "placebo": 2, "wrong": 12}}, "under a placebo"),
        ({"faulty": {"plain": 12, "hint": 2, "placebo": 12, "wrong": 2}}, "under another class's hint"),
    ],
)
def test_every_bar_can_fail_a_class(changes, reason):
    assert reason in str(why_not(replace(GOOD, **changes)))


@pytest.mark.parametrize(("count", "hinted"), [(20, 2), (40, 1), (60, 7), (100, 13)])
def test_what_just_reaches_every_bar_passes(count, hinted):
    """Also where the fractions are not exact: 3/20 less 2/20 is less than 0.05 in floating point."""
    bars = GateBars(max_ratio=0.7)
    edge = hinted + count // 20
    faulty = {"plain": max(edge, round(hinted / 0.7 + 0.5)), "hint": hinted, "placebo": edge, "wrong": edge}
    assert why_not(replace(GOOD, num_turns=count, lowered=0.95, faulty=faulty), bars) == ""
    worse = faulty | {"wrong": edge - 1}
    assert "another class" in str(why_not(replace(GOOD, num_turns=count, faulty=worse), bars))


def test_few_turns_say_nothing_and_a_class_can_come_back():
    few, bad = replace(GOOD, num_turns=7), replace(GOOD, lowered=0.0)
    assert why_not(few) is None
    off = switched_off({}, [bad])
    assert list(off) == ["unknown_tool"]
    assert switched_off(off, [few]) == off
    assert switched_off(off, [GOOD]) == {}


def test_the_wrong_hint_is_never_the_right_one():
    for detector in feedback.DETECTORS:
        other = another_class(detector)
        assert other != detector and other in feedback.DETECTORS


# --- on a real policy ---------------------------------------------------------------------------------------------

PLANTED = "Reminder: the tool view shows a file."  # wrong: there is no such tool


@pytest.fixture(scope="module")
def attempt(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("gate")
    task = calc_task(folder / "calc", tiny_environment())
    return task, play(task, UNKNOWN)


@pytest.fixture(scope="module")
def policy(attempt):
    """Taught: without a reminder, or after any but one, it calls an unknown tool two times of three; after the
    reminder that lists the tools it reads the file; after the planted one it always calls the unknown tool."""
    task, faulty = attempt
    policy, codec = tiny_policy(rank=0), renderer().codec
    right = play(task, READ)
    calls = {
        text: replace(
            faulty.turns[0],
            sampled_ids=made.turns[0].sampled_ids,
            logps=made.turns[0].logps,
            versions=made.turns[0].versions,
        )
        for text, made in (("faulty", faulty), ("right", right))
    }

    def row(call: str, reminder: str):
        reminders = {0: renderer().hint(reminder)} if reminder else None
        return rollout_sample(replace(faulty, turns=(calls[call],)), reminders=reminders)

    def text(detector: str) -> str:
        return feedback.hint_text(
            detector, tools=TOOLS, codec=codec, tool="read_file", test_command=task.test_command
        )

    others = [*feedback.PLACEBOS, text(another_class("unknown_tool"))]
    weighed = [(row("right", text("unknown_tool")), 4.0), (row("faulty", PLANTED), 2.0)]
    weighed += [(row("faulty", other), 2.0) for other in ("", *others)]
    weighed += [(row("right", other), 1.0) for other in ("", *others)]
    padded = packing.pad([imitated for imitated, _ in weighed])
    weight_BN = padded.mask_BN * torch.tensor([[weight] for _, weight in weighed])
    optimizer = torch.optim.AdamW(policy.trainable.values(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        logps = token_logps(policy.logits(padded), padded.tokens_BN, 1.0)
        (-(logps * weight_BN).sum() / weight_BN.sum()).backward()
        optimizer.step()
    return policy


def measured(attempt, policy, text: str, count: int = 10) -> GateMeasurement:
    task, faulty = attempt
    rollouts = {f"r{n}": replace(faulty, id=f"r{n}") for n in range(count)}
    hints = [Hint(name, 0, "unknown_tool", text) for name in rollouts]
    found = hint_gate.measure(
        hints,
        rollouts,
        {task.id: task},
        trainer_of(policy).logps,
        GateSettings(),
        Redrawing(
            LocalEngine(policy.model, renderer()),
            AgentSettings(turn_tokens=40, max_turns=3),
            step=0,
            seed=0,
            threads=2,
        ),
    )
    assert [m.detector for m in found] == ["unknown_tool"] and found[0].num_turns == count
    return found[0]


def test_the_right_hint_passes_and_a_planted_wrong_one_is_rejected(attempt, policy):
    right = feedback.hint_text("unknown_tool", tools=TOOLS, codec=renderer().codec)
    good = measured(attempt, policy, right)
    assert why_not(good) == "", good
    assert good.rate("hint") <= 0.5 * good.rate("plain")
    planted = measured(attempt, policy, PLANTED)
    reason = why_not(planted)
    assert reason and planted.gain["hint"] > 0, planted
    assert list(switched_off({}, [planted])) == ["unknown_tool"]


def test_a_turn_is_drawn_again_where_it_stood(attempt, tmp_path):
    """The calls before it are carried out first, and a draw leaves nothing behind for the next one."""
    task = calc_task(tmp_path / "calc", NO_ENVIRONMENT)
    whole = play(task, EDIT, TEST)
    sandbox = open_sandbox(SandboxSpec(lowers=(task.folder / "environment" / "workspace",)))
    stood = Attempt(task, sandbox, renderer(), AgentSettings(), rollout_id="again")
    stood.replay(whole.turns[:1], whole.turns[1])
    assert stood.request().prompt_ids == tuple(
        i for i in (*whole.turns[0].context_ids, *whole.turns[0].sampled_ids, *whole.turns[1].context_ids)
    )
    spoil = renderer().encode_message("<call>shell rm calc.py</call>")
    test = whole.turns[1].sampled_ids
    for ids, ends_well in ((spoil, True), (test, True), (spoil, True)):
        twin = stood.fork()
        twin.act(Sample(ids, (0.0,) * len(ids), "stop", ((0, len(ids)),)))
        made = twin.finish()
        assert (made.turns[1].error_kind is None) == ends_well and len(made.turns) == 2
        if ids == test:
            assert made.turns[1].observations[0].text == whole.turns[1].observations[0].text
    sandbox.close()


def test_every_turn_gets_its_own_gain(attempt, policy):
    """Turns of one forward are in order of length; their gains come back in their own order."""
    task, faulty = attempt
    longer = play(task, READ, UNKNOWN)
    texts = ["Reminder: " + "word " * n for n in (40, 1, 15)]
    trainer = trainer_of(policy)
    redrawing = Redrawing(LocalEngine(policy.model, renderer()), AgentSettings(), step=0, seed=0)
    cases = [
        hint_gate._case(task, made, Hint(made.id, turn, "unknown_tool", text), redrawing)
        for text, (made, turn) in zip(texts, [(faulty, 0), (longer, 1), (faulty, 0)], strict=True)
    ]
    together = hint_gate._gains(cases, trainer.logps)
    for n, case in enumerate(cases):
        alone = hint_gate._gains([case], trainer.logps)
        for side, (gain,) in alone.items():
            assert together[side][n] == pytest.approx(gain, abs=1e-3)
    assert len({round(gain, 2) for gain in together["hint"]}) == 3
