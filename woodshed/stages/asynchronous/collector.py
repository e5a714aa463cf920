"""The collector: the process that makes experience while the trainer learns from what was made before.

It owns the choice of tasks, the admission of groups, attempts, verdicts, flags, hints and reward terms, and the weights
of the engines, which nobody else talks to: the version that samples is a variable of this process. Attempts of several
steps are in flight together, and go on while weights change. An evaluation is pinned to its version: later weights wait
until its attempts are made.

The tasks of step k are drawn once step k - S - 1 was taken, by what was observed up to there and no further, so the
same seed and staleness S draw the same tasks, however fast anything is.

All that it knows is in the run folder: killed anywhere and started again, it goes on, and each attempt in the middle
with it (`experience.journal`).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from woodshed import feedback
from woodshed.agent.prompt import with_effort
from woodshed.engines.engine import Engine, WeightUpdate
from woodshed.evals import manifest
from woodshed.experience import Collector, token_texts
from woodshed.experience.admission import Admission
from woodshed.experience.annotations import Annotator, critic_of, with_levels
from woodshed.experience.collector import InFlight, SandboxPool, Slot
from woodshed.experience.journal import Journal
from woodshed.grading import Judging
from woodshed.monitors import flag_policy
from woodshed.records import Flag, Hint, RewardTerms, Rollout, Task, Verdict
from woodshed.runs.folder import RunDir
from woodshed.stages.asynchronous.batch import AttemptBatch
from woodshed.stages.asynchronous.collector_recipe import CollectorRecipe
from woodshed.stages.asynchronous.messages import Collected, Draw, Publication, read_experience
from woodshed.stages.choosing import Choosing
from woodshed.tasks import folder

TURN_S = 0.25
"""Longest time between two looks at what the trainer has published."""


class CollectorProcess:
    """The work of a collector's process; `run` does all of it."""

    def __init__(
        self,
        run: RunDir,
        recipe: CollectorRecipe,
        engine: Engine,
        practice: Sequence[Task],
        heldout: Sequence[Task],
        progress: Callable[[int, int, str], None],
    ) -> None:
        self.folder, self.recipe, self.engine, self.progress = run, recipe, engine, progress
        self.heldout = heldout
        self.admission = Admission(recipe.rl.tasks_per_step, recipe.rl.staleness)
        self.choosing = Choosing(
            run,
            practice,
            recipe.curriculum,
            recipe.sandbox,
            seed=recipe.seed,
            attempts=recipe.rollout.attempts,
        )
        self.annotator = Annotator(
            engine.renderer,
            recipe.agent.tools.specs,
            recipe.feedback.detectors,
            recipe.rewards,
            recipe.effort,
            critic_of(recipe.critic, engine),
            recipe.critic.rollouts,
            recipe.seed,
        )
        self.journal = Journal(run.path / "turns")
        self.known = {task.id: task for task in practice}
        self.published: list[Publication] = []
        self.loaded = -1
        """Version that the engine samples by; -1 before the first."""
        self.batches: list[AttemptBatch] = []
        self.observed = 0
        """Steps that the choice of tasks has learned from."""
        self.update: tuple[Publication, Future[None]] | None = None
        """Weights that the engine is loading."""
        self.dry = False
        self.idle_s = 0.0

    # -- the run folder --------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Read from the run folder how far an earlier process of this run came."""
        draws = {step: draw for _, step, draw in self.folder.read("draws", Draw)}
        grown = self.folder.path / "tasks" / "grown"
        if grown.is_dir() and any(grown.iterdir()):
            self.known |= {task.id: task for task in folder.load_set(grown)}
        self.dry = any(draw.dry for draw in draws.values())
        drawn = {step: draw for step, draw in sorted(draws.items()) if not draw.dry}
        for step, draw in drawn.items():
            self._open(self._of_step(step, [self.known[name] for name in draw.task_ids]))
        if drawn:
            newest = max(drawn)
            choice = drawn[newest].choice
            self.choosing.restore(choice["curriculum"], choice["growth"])
            self.admission.begun = self.admission.per_step * (newest + 1)
            self.observed = max(0, newest - self.recipe.rl.staleness)
        self.journal.keep_only(
            slot.rollout_id
            for batch in self.batches
            for slot in batch.slots
            if slot.number not in batch.rollouts
        )

    def _of_step(self, step: int, tasks: Sequence[Task]) -> AttemptBatch:
        asked, levels = with_levels(tasks, self.recipe.effort, step)
        return AttemptBatch("train", step, asked, levels, self.recipe.rollout.attempts)

    def _open(self, batch: AttemptBatch) -> AttemptBatch | None:
        """Take up a batch, unless it is collected already."""
        if self.folder.find("collected", Collected, batch.phase, batch.step) is not None:
            return None
        batch.read(self.folder)
        self.batches.append(batch)
        return batch

    # -- the work --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Make the experience of all steps and evaluations that the trainer asks for.

        Raises:
            SandboxError, SamplerError: the machine or the engine failed. What is finished is kept.
            RunError: the run folder cannot be written, or was changed.
        """
        self.restore()
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as updates:
            self.updates = updates
            while not self._serve():
                self.batches = [batch for batch in self.batches if batch.phase == "eval"]
        self.choosing.close()

    def _serve(self) -> bool:
        """Have attempts made until nothing is left to do. False where the trainer has ended before the steps for which
        attempts are in flight: nobody will take them."""
        recipe = self.recipe
        maker = Collector(
            self.engine,
            recipe.harness.rollout,
            recipe.agent,
            seed=recipe.seed,
            sandboxes=recipe.sandbox.create(),
        )
        tasks = [*self.known.values(), *self.heldout]
        with ExitStack() as stack:
            self.judging = stack.enter_context(Judging(tasks, recipe.grading, recipe.sandbox.create()))
            self.watching = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="watching"))
            pool = stack.enter_context(SandboxPool(maker))
            harness = stack.enter_context(maker.harness(pool))
            self.flight = stack.enter_context(InFlight(maker, pool, harness))
            self.flight.journal = self.journal
            self.of: dict[Slot, AttemptBatch] = {}
            begun = list(self.batches)
            while self.loaded < 0:  # nothing is sampled by weights of which nobody knows the version
                self._show_life()
                self._follow()
                time.sleep(TURN_S / 5)
            for batch in begun:
                self._resume(batch)
            looked = -TURN_S
            while not self._is_done():
                if time.monotonic() - looked >= TURN_S:
                    looked = time.monotonic()
                    self._show_life()
                    self._follow()
                    if self.is_abandoned:
                        return False
                self._draw()
                before = time.monotonic()
                for slot, made in self.flight.turn(TURN_S):
                    self._keep(self.of.pop(slot), slot.number, made)
                self._count_idle(time.monotonic() - before)
        return True

    @property
    def last(self) -> Publication | None:
        """The weights behind which no step follows, once they are published."""
        newest = self.published[-1] if self.published else None
        return newest if newest is not None and newest.is_last else None

    @property
    def is_abandoned(self) -> bool:
        """True where attempts are in flight for steps that nobody will take."""
        last = self.last
        return last is not None and any(b.phase == "train" and b.step >= last.version for b in self.batches)

    def _is_done(self) -> bool:
        return self.last is not None and self.loaded == self.last.version and not self.batches

    def _show_life(self) -> None:
        os.utime(self.folder.path / "lock-collector")

    def _count_idle(self, seconds: float) -> None:
        """Count places for attempts that no admitted attempt uses."""
        flight, most = self.flight, self.recipe.rollout.max_in_flight
        if not flight.waiting:
            self.idle_s += seconds * max(0.0, 1 - len(flight.flying) / most)

    def _resume(self, batch: AttemptBatch) -> None:
        """Have done what is missing of a batch."""
        slots = [slot for slot in batch.slots if slot.number not in batch.rollouts]
        self.of |= dict.fromkeys(slots, batch)
        if batch.phase == "eval":
            self.flight.waiting.extendleft(reversed(slots))  # it is what new weights wait for
        else:
            self.flight.waiting.extend(slots)
        for part, made in batch.rollouts.items():
            if part not in batch.verdicts:
                self._judge(batch, part, made)
        for place in range(len(batch.tasks)):
            if batch.is_judged(place) and place not in batch.flags:
                self._watch(batch, place)
        self._finish(batch)

    # -- weights ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Have the engine load the next weights, where there are some and no evaluation needs those it has."""
        for batch in self.folder.batches("published")[len(self.published) :]:
            self.published += self.folder.find("published", Publication, *batch[:2], part=batch[2]) or []
        if self.update is not None:
            chosen, future = self.update
            if future.done():
                self.update = None
                future.result()
                self._loaded(chosen)
            return
        if any(batch.phase == "eval" for batch in self.batches):
            return
        newer = [each for each in self.published if each.version > self.loaded]
        owed = [each for each in newer if each.is_measured and self._is_owed(each)]
        if newer:
            chosen = (owed or newer[-1:])[0]
            self.update = chosen, self.updates.submit(self._load, chosen)

    def _load(self, chosen: Publication) -> None:
        update = WeightUpdate(chosen.kind, self.folder.path / chosen.folder)
        self.engine.update_weights(update, chosen.version)

    def _loaded(self, chosen: Publication) -> None:
        self.loaded = chosen.version
        self.admission.publish(chosen.version)
        self.progress(0, 0, f"version {chosen.version}: its weights are loaded")
        if chosen.is_measured and self._is_owed(chosen):
            self._evaluate(chosen.version)

    def _is_owed(self, chosen: Publication) -> bool:
        """True where the evaluation of some weights is not collected."""
        collected = self.folder.find("collected", Collected, "eval", chosen.version)
        return bool(self.heldout) and collected is None

    def _evaluate(self, version: int) -> None:
        recipe, settings = self.recipe, self.recipe.evaluation
        tasks = list(self.heldout)
        conditions = manifest.score(
            self.engine,
            tasks,
            recipe.agent,
            recipe.grading,
            attempts=settings.attempts,
            seed=recipe.seed,
            effort=settings.effort,
        )
        manifest.keep(self.folder, conditions)
        if settings.effort is not None:
            tasks = [with_effort(task, settings.effort) for task in tasks]
        batch = self._open(AttemptBatch("eval", version, tasks, {}, settings.attempts))
        if batch is not None:
            self._resume(batch)

    # -- tasks -----------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draw the tasks of every step whose groups may begin."""
        while not self.dry and self.loaded >= 0 and self.last is None and self.admission.startable():
            step = self.admission.begun // self.admission.per_step
            if step >= self.recipe.rl.steps:
                return
            while self.observed < step - self.recipe.rl.staleness:
                self._observe(self.observed)
                self.observed += 1
            count = self.admission.per_step
            if reason := self.choosing.choice.why_dry(count):
                self.dry = True
                empty = Draw((), (), self.recipe.seed, self.loaded, dry=reason)
                self.folder.append("draws", [empty], "train", step)
                return
            tasks = self.choosing.draw(count)
            self.known |= {task.id: task for task in tasks}
            self.judging.know(tasks)
            groups = tuple(self.admission.groups(step))
            names = tuple(task.id for task in tasks)
            state, told = self.choosing.state(), dict(self.choosing.told())
            drawn = Draw(groups, names, self.recipe.seed, self.loaded, state, told)
            self.folder.append("draws", [drawn], "train", step)
            for group in groups:
                self.admission.begin(group)
            batch = self._open(self._of_step(step, tasks))
            assert batch is not None, f"step {step} is collected before it was drawn"
            self._resume(batch)

    def _observe(self, step: int) -> None:
        """Let the choice of tasks learn from a step that was taken."""
        draw = (self.folder.find("draws", Draw, "train", step) or [])[0]
        attempts = self.recipe.rollout.attempts
        self.choosing.observe(read_experience(self.folder, "train", step, draw.task_ids, attempts))

    # -- attempts --------------------------------------------------------------------------------------------------

    def _keep(self, batch: AttemptBatch, part: int, made: Rollout) -> None:
        place = (batch.phase, batch.step)
        texts = token_texts([made], self.engine.renderer)
        self.folder.append("token_texts", [texts], *place, part=part)
        self.folder.append("rollouts", [made], *place, part=part)
        self.journal.remove(made.id)
        batch.rollouts[part] = made
        self._judge(batch, part, made)

    def _judge(self, batch: AttemptBatch, part: int, made: Rollout) -> None:
        def judged(future: Future[Verdict]) -> None:
            verdict = dataclasses.replace(future.result(), rollout_id=made.id)
            self.folder.append("verdicts", [verdict], batch.phase, batch.step, part=part)
            batch.verdicts[part] = verdict
            place = part // batch.attempts
            if batch.is_judged(place):
                self._watch(batch, place)

        self._when_done(self.judging.add(made), judged)

    def _watch(self, batch: AttemptBatch, place: int) -> None:
        group = batch.group(place)
        verdicts = {
            made.id: batch.verdicts[part]
            for part, made in zip(batch.parts(place), group.rollouts, strict=True)
        }

        def watched(future: Future[list[Flag]]) -> None:
            flags = future.result()
            self.folder.append("flags", flags, batch.phase, batch.step, part=place)
            batch.flags[place] = flags
            self._finish(batch)

        settings, tasks = self.recipe.monitors, [batch.tasks[place]]
        self._when_done(
            self.watching.submit(flag_policy.look, group.rollouts, tasks, verdicts, settings), watched
        )

    def _when_done(self, future: Future[Any], then: Callable[[Any], None]) -> None:
        """Handle a result on this thread."""
        future.add_done_callback(lambda done: self.flight.events.put(partial(then, done)))

    def _finish(self, batch: AttemptBatch) -> None:
        """Annotate a batch of which every attempt is graded and watched."""
        if not batch.is_complete:
            return
        seen, place = batch.experience, (batch.phase, batch.step)
        codec, tools = self.engine.renderer.codec, self.recipe.agent.tools.specs

        def hints() -> list[Hint]:
            if batch.phase == "eval":
                return feedback.write(seen.groups, batch.tasks, codec, tools=tools)
            return self.annotator.hints(seen.groups, batch.tasks, seen.verdicts)

        self.folder.once("hints", Hint, *place, hints)
        if batch.phase == "train" and self.annotator.counts(batch.levels):
            levels = batch.levels
            self.folder.once(
                "reward_terms",
                RewardTerms,
                *place,
                lambda: self.annotator.reward_terms(seen.groups, batch.tasks, levels),
            )
        flight = self.flight
        collected = Collected(self.idle_s, flight.replayed, flight.restarted)
        self.idle_s, flight.replayed, flight.restarted = 0.0, 0, 0
        self.folder.append("collected", [collected], *place)
        self.batches.remove(batch)
        self.progress(
            0, 0, f"{batch.phase} {batch.step}: all {len(batch.rollouts)} attempts are kept and graded"
        )
