"""The trainer's side: steps taken from what a collector has written into the run folder, weights left there for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from woodshed.evals import summarize
from woodshed.evals.evaluation import Evaluation
from woodshed.evals.measures import pair
from woodshed.experience import Experience
from woodshed.experience.admission import Admission, refuse_older
from woodshed.learning import publish
from woodshed.learning.checkpoint import TrainState
from woodshed.records import Hint, RewardTerms, Rollout, RunError, Task
from woodshed.runs.pace import duration
from woodshed.stages import evaluate
from woodshed.stages.asynchronous.messages import (
    Collected,
    Draw,
    Publication,
    Taken,
    publish_again,
    read_experience,
)
from woodshed.stages.session import Clock, Session
from woodshed.stages.sources import StepExperience, hints_to_learn, is_measured
from woodshed.tasks import folder

T = TypeVar("T")

LOOK_S = 0.2
"""Time between two looks at the collector's files."""
SILENT_S = 600.0
"""A collector that has shown no life for so long is not waited for. Its work may take any time: it shows life between
any two events."""
COLLECTOR_LOCK = "lock-collector"


class Tailing:
    """Attempts of a collector, read from the run folder as they are complete. See `ExperienceSource`."""

    def __init__(self, session: Session) -> None:
        self.session, self.run, recipe = session, session.run, session.recipe
        self.staleness, self.attempts = recipe.rl.staleness, recipe.rollout.attempts
        self.admission = Admission(recipe.rl.tasks_per_step, self.staleness)
        self.tasks = {task.id: task for task in session.practice}
        self.waited_s = 0.0
        self.versions: dict[int, tuple[int, int]] = {}
        """Oldest and newest version behind the step that was taken last."""

    # -- weights ---------------------------------------------------------------------------------------------------

    def publish(self, state: TrainState, *, is_last: bool) -> None:
        """Leave the weights of a checkpoint for the engines, and note the step that it has learned from.

        A version that was published before is the same, since a step that is taken again has the same groups.

        Raises:
            RunError: later weights were published, whose checkpoint is gone.
        """
        version, root = state.version, self.run.path / "weights"
        newest = max((step for _, step, _ in self.run.batches("published")), default=0)
        if newest > version:
            raise RunError(
                f"{self.run.path}: weights of version {newest} were published, and the newest checkpoint is version "
                f"{version}; attempts of weights that no checkpoint has cannot be learned from. Start another run from "
                f"{self.run.path / 'checkpoints'} (policy.adapter or policy.model)"
            )
        measured = is_measured(self.session.recipe, state.step) or bool(state.stopped)
        known = [offer for _, step, offer in self.run.read("published", Publication) if step == version]
        is_told = known and (self.run.path / known[-1].folder).is_dir() and known[-1].is_last == is_last
        behind = self.staleness + 2  # so many versions behind an engine that evaluates may be
        worker, renderer = self.session.worker, self.session.renderer
        update = None if is_told else publish.write(worker, renderer, root, version, behind)
        worker.settle()  # what others are told has a checkpoint
        self._note_taken(state)
        if update is None:
            return
        assert update.folder is not None and update.kind != "shared"
        name = update.folder.relative_to(self.run.path).as_posix()
        offer = Publication(version, name, update.kind, measured, is_last)
        publish_again(self.run, offer)

    def _note_taken(self, state: TrainState) -> None:
        """Write which groups the checkpoint has learned from, and those before it; a kill may have kept one back."""
        noted = {step for _, step, _ in self.run.batches("taken")}
        for step in range(state.step):
            if step not in noted:
                versions = self.versions.get(step) or _versions(self._experience(step).rollouts)
                taken = Taken(tuple(self.admission.groups(step)), versions)
                self.run.append("taken", [taken], "train", step)

    # -- attempts --------------------------------------------------------------------------------------------------

    def take(self, state: TrainState, clock: Clock) -> StepExperience:
        """See `ExperienceSource`.

        Raises:
            RunError: the collector shows no life, or an attempt is of weights that the step may not learn from.
        """
        step, find = state.step, self.run.find
        began = time.monotonic()
        self._wait(f"train {step}: attempts", lambda: find("collected", Collected, "train", step))
        self.waited_s = time.monotonic() - began
        attempts = self._experience(step)
        refuse_older(attempts.rollouts, step, self.staleness)
        self.versions = {step: _versions(attempts.rollouts)}
        clock.lap("attempts")
        hints = find("hints", Hint, "train", step) or []
        terms = find("reward_terms", RewardTerms, "train", step) or []
        tasks = self._tasks([group.task_id for group in attempts.groups])
        chosen = hints_to_learn(self.session.recipe, hints, attempts.rollouts, tasks)
        clock.lap("feedback")
        return StepExperience(attempts, chosen, terms, state.disabled_hints)

    def learned(self, state: TrainState, seen: StepExperience) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """See `ExperienceSource`; with how old the tokens were, and who waited for whom."""
        step = state.step
        collected = (self.run.find("collected", Collected, "train", step) or [])[0]
        waits = {"trainer_s": self.waited_s, "admission_s": collected.idle_s}
        told = staleness(seen.attempts.rollouts, step) | {"waits": waits}
        told |= {"replayed": collected.replayed, "restarted": collected.restarted}
        return {**self._draw(step).told, **told}, {}

    def why_dry(self, step: int) -> str:
        """See `ExperienceSource`."""
        self._wait(f"train {step}: tasks", lambda: self.run.find("draws", Draw, "train", step))
        return self._draw(step).dry

    def _draw(self, step: int) -> Draw:
        return (self.run.find("draws", Draw, "train", step) or [])[0]

    def _experience(self, step: int) -> Experience:
        return read_experience(self.run, "train", step, self._draw(step).task_ids, self.attempts)

    def _tasks(self, names: Sequence[str]) -> list[Task]:
        if not self.tasks.keys() >= set(names):  # the pool has grown
            grown = folder.load_set(self.run.path / "tasks" / "grown")
            self.tasks |= {task.id: task for task in grown}
        return [self.tasks[name] for name in names]

    # -- evaluations -----------------------------------------------------------------------------------------------

    def measure(self, state: TrainState, *, is_last: bool) -> None:
        """Keep the metrics of evaluations that are complete; the last time, wait for all of them."""
        if not self.session.heldout:
            return
        offers = [offer for _, _, offer in self.run.read("published", Publication) if offer.is_measured]
        for version in sorted({offer.version for offer in offers}):

            def collected(version: int = version) -> list[Collected] | None:
                return self.run.find("collected", Collected, "eval", version)

            if is_last:
                self._wait(f"eval {version}: attempts", collected)
            if collected() is not None:
                self._record(version)

    def _record(self, version: int) -> None:
        names = [task.id for task in self.session.heldout]
        seen = read_experience(self.run, "eval", version, names, self.session.recipe.evaluation.attempts)
        refuse_older(seen.rollouts, version, 0)
        verdicts = list(seen.verdicts.values())
        self.run.once(
            "metrics", dict, "eval", version, lambda: [summarize(seen.rollouts, verdicts, flags=seen.flags)]
        )
        graded = pair(seen.rollouts, verdicts, flags=seen.flags)
        evaluate.record_effort(self.run, Evaluation(version, tuple(graded)))

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait(self, text: str, ready: Callable[[], T | None]) -> T:
        """The first thing that `ready` gives; the collector must show life meanwhile."""
        began, told = time.monotonic(), False
        while (found := ready()) is None:
            self._refuse_silence(began, text)
            if not told:
                self.session.progress(0, 0, f"{text} are waited for")
                told = True
            time.sleep(LOOK_S)
        return found

    def _refuse_silence(self, began: float, text: str) -> None:
        lock = self.run.path / COLLECTOR_LOCK
        try:
            silent_s = time.time() - lock.stat().st_mtime
            owner = lock.read_text().strip() or "unknown"
        except OSError:
            silent_s, owner = time.monotonic() - began, "none was started"
        if min(silent_s, time.monotonic() - began) > SILENT_S:
            raise RunError(
                f"{text} are waited for, and the collector (process {owner}) has shown no life for "
                f"{duration(silent_s)}; {self.run.path / 'logs' / 'collector.log'} has what it said. What is complete "
                f"is kept: go on with `{self.run.resuming}`"
            )

    def close(self) -> None:
        """See `ExperienceSource`."""


def _versions(rollouts: Sequence[Rollout]) -> tuple[int, int]:
    found = [version for made in rollouts for turn in made.turns for version, _ in turn.versions] or [0]
    return min(found), max(found)


def staleness(rollouts: Sequence[Rollout], step: int) -> dict[str, Any]:
    """Age of a step's tokens in steps, versions of a message, and messages that went on over an update."""
    turns = [turn for made in rollouts for turn in made.turns if turn.sampled_ids]
    spans = [(step - version, tokens) for turn in turns for version, tokens in turn.versions]
    tokens = sum(count for _, count in spans)
    return {
        "staleness_mean": sum(age * count for age, count in spans) / max(tokens, 1),
        "staleness_max": max((age for age, _ in spans), default=0),
        "versions_per_message": sum(len({v for v, _ in t.versions}) for t in turns) / max(len(turns), 1),
        "continued_messages": sum(len(turn.versions) > 1 for turn in turns),
    }
