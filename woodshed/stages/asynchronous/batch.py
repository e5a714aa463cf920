"""Attempts of one step or one evaluation, on their way into the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from woodshed.agent.prompt import Effort
from woodshed.experience import Experience
from woodshed.experience.collector import Slot
from woodshed.records import Flag, Group, Rollout, Task, Verdict
from woodshed.runs.folder import RunDir


@dataclass(eq=False)
class AttemptBatch:
    """Attempts at the tasks of one step or one evaluation, and what is known about them so far.

    A part of its rollouts and verdicts is one attempt, a part of its flags one group.
    """

    phase: str
    step: int
    tasks: Sequence[Task]
    """As their prompts put them."""
    levels: dict[str, Effort]
    """Task id to the effort that its prompt asks for."""
    attempts: int
    """At each task."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    flags: dict[int, list[Flag]] = field(default_factory=dict)

    @property
    def slots(self) -> list[Slot]:
        """Every attempt, in the order of its parts."""
        return [
            Slot(part, task, n, f"{self.phase}-{self.step}-{task.name}-{n}")
            for part, (task, n) in enumerate((task, n) for task in self.tasks for n in range(self.attempts))
        ]

    def parts(self, place: int) -> range:
        """Parts of the attempts of a group."""
        return range(place * self.attempts, (place + 1) * self.attempts)

    def group(self, place: int) -> Group:
        """The attempts at a task, all of which are there."""
        return Group(self.tasks[place].id, tuple(self.rollouts[part] for part in self.parts(place)))

    def is_judged(self, place: int) -> bool:
        """True where all attempts of a group have verdicts."""
        return all(part in self.verdicts for part in self.parts(place))

    @property
    def is_complete(self) -> bool:
        """True where all groups have been graded and watched."""
        return len(self.flags) == len(self.tasks)

    @property
    def experience(self) -> Experience:
        """All of it, once it is complete."""
        places = range(len(self.tasks))
        return Experience(
            [self.group(place) for place in places],
            {verdict.rollout_id: verdict for verdict in self.verdicts.values()},
            [flag for place in places for flag in self.flags[place]],
        )

    def read(self, run: RunDir) -> None:
        """Take what the run folder holds."""
        for part in range(len(self.tasks) * self.attempts):
            for made in run.find("rollouts", Rollout, self.phase, self.step, part=part) or []:
                self.rollouts[part] = made
            for verdict in run.find("verdicts", Verdict, self.phase, self.step, part=part) or []:
                self.verdicts[part] = verdict
        for place in range(len(self.tasks)):
            flags = run.find("flags", Flag, self.phase, self.step, part=place)
            if flags is not None:
                self.flags[place] = flags
