"""Measuring hints on real faulty turns: scored by the weights at hand, and drawn again in a sandbox.

Each turn is seen four times: as it was, after its hint, after a placebo, after a hint of another class. For drawing
again, the rollout's earlier calls are carried out once in a fresh sandbox, which is then forked for every draw.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from woodshed.agent.attempt import AgentSettings, Attempt, turn_seed
from woodshed.engines.engine import Engine, Sample, SampleRequest, sample_all
from woodshed.experience.compile import hint_branch, rollout_sample, subsample
from woodshed.experience.samples import HintBranch, TrainingSample, student_view, teacher_view
from woodshed.feedback import NAMED, PLACEBOS, hint_text
from woodshed.feedback.detectors import Detector
from woodshed.feedback.gate import SIDES, GateMeasurement, GateSettings, Side, another_class
from woodshed.records import CALL_FAULTS, Hint, Rollout, SandboxError, Task
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.tasks.environment import sandbox_spec

Logps = Callable[[Sequence[TrainingSample]], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Case:
    """One faulty turn with everything that is said before it."""

    task: Task
    rollout: Rollout
    hint: Hint
    sides: dict[Side, TrainingSample]
    """The turn's message behind what is said before it on each side."""


@dataclass(frozen=True)
class Redrawing:
    """Everything that it takes to draw turns again, the same for all of them."""

    engine: Engine
    agent: AgentSettings
    step: int
    """Optimizer step of the measurement, a part of seeds."""
    seed: int
    threads: int = 1
    """Sandboxes in use at once."""
    sandboxes: SandboxProvider = BUBBLEWRAP


def measure(
    hints: Sequence[Hint],
    rollouts: Mapping[str, Rollout],
    tasks: Mapping[str, Task],
    logps: Logps,
    settings: GateSettings,
    redrawing: Redrawing,
) -> list[GateMeasurement]:
    """Measure every class of hints among `hints`, on up to `settings.turns` of its turns.

    Args:
        rollouts, tasks: those of the hints, by id.
        logps: the policy's log-probs of the predicted tokens of samples.

    Raises:
        SandboxError: a sandbox could not be opened. A turn whose sandbox is lost is left out.
    """
    measurements = []
    for detector in dict.fromkeys(hint.detector for hint in hints):
        chosen = subsample([h for h in hints if h.detector == detector], settings.turns)
        cases = []
        for hint in chosen:
            rollout = rollouts[hint.rollout_id]
            cases.append(_case(tasks[rollout.task_id], rollout, hint, redrawing))
        redrawn = _redraw(cases, NAMED.resolve(detector), redrawing)
        kept = [case for case, faulty in zip(cases, redrawn, strict=True) if faulty is not None]
        if not kept:
            continue
        gains = _gains(kept, logps)
        measurements.append(
            GateMeasurement(
                detector,
                len(kept),
                {side: sum(values) / len(values) for side, values in gains.items()},
                sum(gain < 0 for gain in gains["hint"]) / len(kept),
                {side: sum(faulty[side] for faulty in redrawn if faulty is not None) for side in SIDES},
            )
        )
    return measurements


def _case(task: Task, rollout: Rollout, hint: Hint, redrawing: Redrawing) -> Case:
    """The turn after its own hint, a placebo, a hint of another class, and as it was ("plain")."""
    renderer = redrawing.engine.renderer
    rng = random.Random(f"{redrawing.seed}/{rollout.id}/{hint.turn}/placebo")
    wrong = hint_text(
        another_class(hint.detector),
        tools=redrawing.agent.tools.specs,
        codec=renderer.codec,
        test_command=task.test_command,
    )
    texts: dict[Side, str] = {"hint": hint.text, "placebo": rng.choice(PLACEBOS), "wrong": wrong}
    segment = next(each for each in rollout.segments if hint.turn in each.indices)
    sample = rollout_sample(rollout, segment)
    branches: dict[Side, HintBranch] = {
        side: hint_branch(segment, replace(hint, text=text), renderer) for side, text in texts.items()
    }
    plain = student_view(sample, branches["hint"])
    hinted: dict[Side, TrainingSample] = {
        side: teacher_view(sample, branch) for side, branch in branches.items()
    }
    return Case(task, rollout, hint, {"plain": plain, **hinted})


def _gains(cases: Sequence[Case], logps: Logps) -> dict[Side, list[float]]:
    """Log-prob of each faulty turn on each side, less the one without a hint."""
    sums = {side: list(map(math.fsum, logps([case.sides[side] for case in cases]))) for side in SIDES}
    return {side: [a - b for a, b in zip(sums[side], sums["plain"], strict=True)] for side in SIDES[1:]}


def _redraw(cases: Sequence[Case], detector: Detector, redrawing: Redrawing) -> list[dict[Side, bool] | None]:
    """Draw every turn again on each side, and say on which it is faulty; None where its sandbox was lost."""
    engine, prefix = redrawing.engine, f"gate-{redrawing.step}"
    requests = [
        SampleRequest(
            prompt_ids=case.sides[side].ids[: case.sides[side].predicted[0]],
            max_tokens=redrawing.agent.turn_tokens,
            seed=turn_seed(redrawing.seed, f"{prefix}-{case.rollout.id}-{side}", case.hint.turn),
        )
        for case in cases
        for side in SIDES
    ]
    engine.flush()
    samples = sample_all(engine, requests)
    engine.flush()

    def faulty_sides(index: int) -> dict[Side, bool] | None:
        begin = index * len(SIDES)
        own = dict(zip(SIDES, samples[begin : begin + len(SIDES)], strict=True))
        try:
            attempt = _attempt_before(cases[index], redrawing)
        except SandboxError:
            return None
        try:
            return {side: _is_faulty(cases[index], attempt, own[side], detector) for side in SIDES}
        except SandboxError:
            return None
        finally:
            attempt.sandbox.close()

    with ThreadPoolExecutor(redrawing.threads) as pool:
        return list(pool.map(faulty_sides, range(len(cases))))


def _attempt_before(case: Case, redrawing: Redrawing) -> Attempt:
    """The attempt as it stood before the faulty turn, in a sandbox of its own."""
    attempt = Attempt(
        case.task,
        redrawing.sandboxes.open(sandbox_spec(case.task)),
        redrawing.engine.renderer,
        redrawing.agent,
        rollout_id=case.rollout.id,
        context_length=redrawing.engine.context_length,
    )
    attempt.replay(case.rollout.turns[: case.hint.turn], case.rollout.turns[case.hint.turn])
    return attempt


def _is_faulty(case: Case, before: Attempt, sample: Sample, detector: Detector) -> bool:
    """Say if the message is a call fault, or commits the fault of its class again."""
    attempt = before.fork()
    attempt.act(sample)
    attempt.ended = attempt.ended or "max_turns"  # one message is all that is asked
    rollout = attempt.finish()
    if rollout.ended == "sandbox_lost":
        raise SandboxError("the sandbox was lost while a turn was drawn again")
    again = any(fault.turn == case.hint.turn for fault in detector(case.task, rollout))
    return again or rollout.turns[-1].error_kind in CALL_FAULTS
