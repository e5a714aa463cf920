"""Measuring hints on real faulty turns: scored by the weights at hand, and drawn again in a sandbox.

Each turn is seen four times: as it was, after its hint, after a placebo, after a hint of another class. For drawing
again, the rollout's earlier calls are carried out once in a fresh sandbox, which is then forked for every draw.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from woodshed.agent.attempt import AgentSettings, Attempt, turn_seed
from woodshed.agent.tools import TOOLS
from woodshed.engines.engine import Engine, Sample, SampleRequest, sample_all
from woodshed.feedback import NAMED, PLACEBOS, hint_text
from woodshed.feedback.detectors import Detector
from woodshed.feedback.gate import SIDES, GateMeasurement, GateSettings, Side, another_class
from woodshed.learning import packing
from woodshed.learning.packing import Placement, Target
from woodshed.learning.policy import Policy
from woodshed.records import CALL_FAULTS, Hint, Rollout, SandboxError, Task
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.tasks.environment import sandbox_spec
from woodshed.tokens.renderer import Renderer


@dataclass(frozen=True)
class Case:
    """One faulty turn with everything that is said before it."""

    task: Task
    rollout: Rollout
    hint: Hint
    sides: dict[Side, Target]


def measure(
    hints: Sequence[Hint],
    rollouts: Mapping[str, Rollout],
    tasks: Mapping[str, Task],
    policy: Policy,
    engine: Engine,
    settings: GateSettings,
    agent: AgentSettings,
    *,
    step: int,
    seed: int,
    temperature: float,
    micro_batch_tokens: int,
    placement: Placement = "system",
    threads: int = 1,
    sandboxes: SandboxProvider = BUBBLEWRAP,
) -> list[GateMeasurement]:
    """Every class of hints among `hints`, on up to `settings.turns` of its turns.

    Args:
        threads: sandboxes in which turns are drawn again at once.

    Raises:
        SandboxError: a sandbox could not be opened. A turn whose sandbox is lost is left out.
    """
    found = []
    for detector in dict.fromkeys(hint.detector for hint in hints):
        chosen = packing.subsample([h for h in hints if h.detector == detector], settings.turns)
        cases = [
            _case(
                tasks[rollouts[h.rollout_id].task_id],
                rollouts[h.rollout_id],
                h,
                engine.renderer,
                placement,
                seed,
            )
            for h in chosen
        ]
        redrawn = _redraw(
            cases,
            NAMED.resolve(detector),
            engine,
            agent,
            step=step,
            seed=seed,
            threads=threads,
            sandboxes=sandboxes,
        )
        kept = [case for case, drawn in zip(cases, redrawn, strict=True) if drawn is not None]
        if not kept:
            continue
        gains = _gains(kept, policy, temperature, micro_batch_tokens)
        found.append(
            GateMeasurement(
                detector,
                len(kept),
                {side: sum(values) / len(values) for side, values in gains.items()},
                sum(gain < 0 for gain in gains["hint"]) / len(kept),
                {side: sum(drawn[side] for drawn in redrawn if drawn is not None) for side in SIDES},
            )
        )
    return found


def _case(
    task: Task, rollout: Rollout, hint: Hint, renderer: Renderer, placement: Placement, seed: int
) -> Case:
    """The turn after its own hint, a placebo, and a hint of another class; "plain" is each target's student."""
    rng = random.Random(f"{seed}/{rollout.id}/{hint.turn}/placebo")
    wrong = hint_text(
        another_class(hint.detector), tools=TOOLS, codec=renderer.codec, test_command=task.test_command
    )
    texts: dict[Side, str] = {"hint": hint.text, "placebo": rng.choice(PLACEBOS), "wrong": wrong}
    sides: dict[Side, Target] = {
        side: packing.target(rollout, replace(hint, text=text), renderer, placement=placement)
        for side, text in texts.items()
    }
    plain = sides["hint"]
    return Case(task, rollout, hint, {"plain": replace(plain, teacher=plain.student), **sides})


@torch.no_grad()
def _gains(
    cases: Sequence[Case], policy: Policy, temperature: float, micro_batch_tokens: int
) -> dict[Side, list[float]]:
    """Log-prob of each faulty turn on each side, less the one without a hint."""
    sums: dict[Side, list[float]] = {}
    for side in SIDES:
        rows = [case.sides[side].teacher for case in cases]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        found = dict.fromkeys(range(len(rows)), 0.0)
        for chunk in packing.chunks(order, [len(rows[i].ids) for i in order], micro_batch_tokens):
            padded = packing.pad([rows[i] for i in chunk], policy.device)
            logp_BN = policy.logps(padded, temperature) * padded.mask_BN
            found |= zip(chunk, logp_BN.sum(-1).tolist(), strict=True)
        sums[side] = list(found.values())
    return {side: [a - b for a, b in zip(sums[side], sums["plain"], strict=True)] for side in SIDES[1:]}


def _redraw(
    cases: Sequence[Case],
    detector: Detector,
    engine: Engine,
    agent: AgentSettings,
    *,
    step: int,
    seed: int,
    threads: int,
    sandboxes: SandboxProvider,
) -> list[dict[Side, bool] | None]:
    """Whether each turn is faulty again on each side; None where its sandbox was lost."""
    requests = [
        SampleRequest(
            prompt_ids=case.sides[side].teacher.ids[: case.sides[side].teacher.wanted[0]],
            max_tokens=agent.turn_tokens,
            seed=turn_seed(seed, f"gate-{step}-{case.rollout.id}-{side}", case.hint.turn),
        )
        for case in cases
        for side in SIDES
    ]
    engine.flush()
    samples = sample_all(engine, requests)
    engine.flush()

    def drawn(index: int) -> dict[Side, bool] | None:
        begin = index * len(SIDES)
        own = dict(zip(SIDES, samples[begin : begin + len(SIDES)], strict=True))
        try:
            stood = _stand_before(cases[index], engine, agent, sandboxes)
        except SandboxError:
            return None
        try:
            return {side: _is_faulty(cases[index], stood, own[side], detector) for side in SIDES}
        except SandboxError:
            return None
        finally:
            stood.sandbox.close()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(drawn, range(len(cases))))


def _stand_before(case: Case, engine: Engine, agent: AgentSettings, sandboxes: SandboxProvider) -> Attempt:
    """The attempt as it stood before the faulty turn, in a sandbox of its own."""
    made = Attempt(
        case.task,
        sandboxes.open(sandbox_spec(case.task)),
        engine.renderer,
        agent,
        rollout_id=case.rollout.id,
        context_length=engine.context_length,
    )
    made.replay(case.rollout.turns[: case.hint.turn], case.rollout.turns[case.hint.turn])
    return made


def _is_faulty(case: Case, stood: Attempt, sample: Sample, detector: Detector) -> bool:
    """Whether the message is a call fault, or commits the fault of its class again."""
    attempt = stood.fork()
    attempt.act(sample)
    attempt.ended = attempt.ended or "max_turns"  # one message is all that is asked
    rollout = attempt.finish()
    if rollout.ended == "sandbox_lost":
        raise SandboxError("the sandbox was lost while a turn was drawn again")
    again = any(fault.turn == case.hint.turn for fault in detector(case.task, rollout))
    return again or rollout.turns[-1].error_kind in CALL_FAULTS
