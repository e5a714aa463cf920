"""Pipeline from tasks to experience: attempts, verdicts and flags, each kept in the run folder when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from woodshed.agent.attempt import AgentSettings
from woodshed.engines.engine import Engine
from woodshed.experience.collector import Collector, RolloutSettings, parts
from woodshed.grading import GradingSettings, Judging
from woodshed.monitors import flag_policy
from woodshed.monitors.flag_policy import MonitorSettings
from woodshed.records import Flag, Group, Rollout, Task, Verdict
from woodshed.runs.folder import RunDir
from woodshed.sandbox import SandboxSettings
from woodshed.tokens.renderer import Renderer

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class HarnessSettings:
    """Settings of the harness between a policy and its experience."""

    rollout: RolloutSettings
    agent: AgentSettings
    grading: GradingSettings
    monitors: MonitorSettings
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)


@dataclass(frozen=True)
class Occasion:
    """Occasion on which attempts are made, and the number of attempts at each task."""

    phase: str
    step: int
    attempts: int
    seed: int


@dataclass(frozen=True)
class Experience:
    """Attempts, what grading found and what monitors suspect."""

    groups: list[Group]
    verdicts: dict[str, Verdict]
    """By rollout id."""
    flags: list[Flag]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]


def collect(
    run: RunDir,
    engine: Engine,
    tasks: Sequence[Task],
    settings: HarnessSettings,
    occasion: Occasion,
    *,
    progress: Progress | None = None,
) -> Experience:
    """Attempts at the tasks, verdicts and flags. Parts that the run folder holds are not made again.

    Raises:
        SandboxError, SamplerError: the machine or the engine failed. Finished parts are kept.
        RunError: the run folder cannot be written.
    """
    with Judging(tasks, settings.grading, settings.sandbox.create()) as judging:
        return _Collection(run, engine, tasks, settings, occasion, judging, progress).result()


@dataclass(frozen=True)
class _Collection:
    """One call of `collect`."""

    run: RunDir
    engine: Engine
    tasks: Sequence[Task]
    settings: HarnessSettings
    occasion: Occasion
    judging: Judging
    progress: Progress | None

    def result(self) -> Experience:
        occasion, is_repeatable = self.occasion, self.settings.rollout.repeatable
        wanted = parts(self.tasks, occasion.attempts, self.settings.rollout)
        kept = [
            self.run.find("rollouts", Rollout, occasion.phase, occasion.step, part=n)
            for n in range(len(wanted))
        ]
        made: dict[int, Experience] = {}
        for number, rollouts in enumerate(kept):
            if rollouts is not None and is_repeatable:
                made[number] = self._judge(number, wanted[number], rollouts)
        missing = [number for number, rollouts in enumerate(kept) if rollouts is None]
        done = sum(len(rollouts) for rollouts in kept if rollouts is not None)
        with closing(self._collector(done).stream(wanted, occasion.attempts, missing)) as stream:
            for number, groups in stream:
                kept[number] = [rollout for group in groups for rollout in group.rollouts]
                self._keep(number, kept[number] or [])
                if is_repeatable:
                    made[number] = self._judge(number, wanted[number], kept[number] or [])
        for number, rollouts in enumerate(kept):
            if number not in made:
                made[number] = self._judge(number, wanted[number], rollouts or [])
        ordered = [made[number] for number in range(len(wanted))]
        return Experience(
            [group for part in ordered for group in part.groups],
            {name: verdict for part in ordered for name, verdict in part.verdicts.items()},
            [flag for part in ordered for flag in part.flags],
        )

    def _collector(self, done: int) -> Collector:
        occasion, total = self.occasion, len(self.tasks) * self.occasion.attempts

        def ended(rollout: Rollout) -> None:
            nonlocal done
            done += 1
            self._say(done, total, "attempts")
            if not self.settings.rollout.repeatable:
                self.judging.add(rollout)

        if done < total:
            self._say(done, total, "attempts")
        return Collector(
            self.engine,
            self.settings.rollout,
            self.settings.agent,
            seed=occasion.seed,
            prefix=f"{occasion.phase}-{occasion.step}",
            sandboxes=self.settings.sandbox.create(),
            on_rollout=ended,
        )

    def _keep(self, number: int, rollouts: Sequence[Rollout]) -> None:
        phase, step = self.occasion.phase, self.occasion.step
        self.run.append("rollouts", rollouts, phase, step, part=number)
        self.run.append(
            "token_texts", [token_texts(rollouts, self.engine.renderer)], phase, step, part=number
        )

    def _judge(self, number: int, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> Experience:
        """Verdicts and flags of one part."""
        phase, step = self.occasion.phase, self.occasion.step

        def judge() -> list[Verdict]:
            def judged(done: int, total: int, text: str) -> None:
                self._say(done, total, text)

            return list(self.judging.verdicts(rollouts, progress=judged).values())

        verdicts = {
            verdict.rollout_id: verdict
            for verdict in self.run.once("verdicts", Verdict, phase, step, judge, part=number)
        }

        def look() -> list[Flag]:
            return flag_policy.look(rollouts, self.tasks, verdicts, self.settings.monitors)

        flags = self.run.once("flags", Flag, phase, step, look, part=number)
        groups = [Group(task.id, tuple(r for r in rollouts if r.task_id == task.id)) for task in tasks]
        return Experience(groups, verdicts, flags)

    def _say(self, done: int, total: int, text: str) -> None:
        if self.progress:
            self.progress(done, total, f"{self.occasion.phase} {self.occasion.step}: {text}")


def token_texts(rollouts: Iterable[Rollout], renderer: Renderer) -> dict[str, str]:
    """The text of every token id that these attempts sampled; a stop token has none."""
    ids = sorted({i for rollout in rollouts for turn in rollout.turns for i in turn.sampled_ids})
    return {str(i): renderer.decode([i]) for i in ids}
