"""Pool of training tasks, which draws those whose attempts are likely to get different rewards.

Groups with equal rewards have no advantage, so nothing is learned from them. The pool keeps a Beta posterior of every
task's solve rate under the current policy: a prior from the level, the hidden tests and the instruction, refitted to
the observations, and counts of attempts that decay as the policy changes. The weight of a task is

    (P(different rewards) + BONUS sd(p) + STALE log(1 + steps since the last attempt)) / sqrt(tokens per attempt)

times its level's share, reduced after recent draws and if the step already holds a similar task. A share of every step
is drawn uniformly (every task once before any again), and a small share goes to retired tasks, which were solved.

No task is drawn twice in a step, nor in a run: the policy gradient is single-epoch (Composer 2 report, section 4.1),
so no prompt is trained on twice. A recipe with fewer tasks than draws sets `repeats = true`; then tasks may be drawn
again in later steps, and the report counts these.

Costs are counted in tokens, never in seconds, and every draw has its own seed, so a resumed run draws the same tasks
as one that was never interrupted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import model_validator

from woodshed.curriculum.choice import EVEN, KIND
from woodshed.curriculum.levels import Levels
from woodshed.curriculum.posterior import below, deviation, informative, level_offset, prior_strength, sigmoid
from woodshed.records import RecipeError, Rollout, Task, Verdict
from woodshed.settings import Settings

BONUS = 0.5
STALE = 0.02
FADING_USE = 0.9
"""Decay of recent use per step."""
DOUBT = 0.25
"""Prior counts for retiring and parking, equal on both sides so that only attempts decide."""
SOLVED, UNSOLVED, SURE = 0.9, 0.02, 0.9
MIN_ATTEMPTS = 24
"""Number of attempts before a task can be parked."""
RETRY_STEPS = 20
EVEN_SHARE = 0.1
"""Share of the draws in which all tasks are alike."""
PROBE_SHARE = 0.05
"""Share of the draws that goes to retired tasks, to notice forgetting."""
FORGET = 0.98
"""Factor by which the weight of an observation decays per step, because the policy changes."""
BAND = (0.35, 0.65)
"""Mean solve rate that a pool should have: balanced groups maximise p(1-p) (arXiv 2504.03380)."""


class CurriculumSettings(Settings):
    """Settings for drawing tasks."""

    kind: Annotated[str, KIND] = "posterior"
    """posterior: by what is believed about each task's solve rate; even: all tasks alike, each once before any again;
    or package.module:name of your own, a function (tasks, settings, *, seed, attempts, revalidate) that returns a
    `TaskChoice`. Chosen on a simulated learner; no runs with even draws were measured beside it."""
    repeats: bool = False
    """Allow a task to be drawn again in a later step. False is a single epoch: no prompt is trained on twice, and a run
    needs rl.steps x rl.tasks_per_step tasks."""
    grow: bool = False
    """Make harder or easier tasks in the background during the run, when the pool is too easy or too hard."""

    @model_validator(mode="after")
    def _grows_our_pool(self) -> CurriculumSettings:
        if self.grow and self.kind not in ("posterior", EVEN):
            raise ValueError(f"grow = true needs kind = 'posterior' or 'even', not {self.kind!r}")
        return self


Status = Literal["active", "retired", "parked", "broken"]


@dataclass
class Belief:
    """Estimate of one task's solve rate."""

    solved: float = 0.0
    """Decayed number of solved attempts."""
    failed: float = 0.0
    """Decayed number of other attempts."""
    attempts: int = 0
    seen: int = 0
    """Step of the last observation."""
    uses: float = 0.0
    """Decayed number of draws."""
    drawn: int = 0
    """Step of the last draw."""
    draws: int = 0
    """Number of steps that drew the task."""
    tokens: float = 0.0
    """Moving average of the tokens of an attempt; 0 before the first."""
    streak: int = 0
    """Number of steps in a row in which it counted as solved."""
    status: Status = "active"
    since: int = 0
    """Step of the last change of the status."""


def refuse_dry(settings: CurriculumSettings, *, num_tasks: int, steps: int, tasks_per_step: int) -> None:
    """Refuse a run that needs more tasks than there are, before it begins.

    Raises:
        RecipeError: a step needs more tasks than there are, or a single epoch runs out of tasks; names the remedies.
    """
    if not steps:
        return
    if tasks_per_step > num_tasks:
        raise RecipeError(
            f"rl.tasks_per_step = {tasks_per_step}, but there are only {num_tasks} training tasks; "
            "make more tasks or lower it"
        )
    draws = steps * tasks_per_step
    if draws > num_tasks and not settings.repeats:
        raise RecipeError(
            f"rl.steps = {steps} x rl.tasks_per_step = {tasks_per_step} needs {draws} tasks, and there are "
            f"{num_tasks}: in a single epoch no task is trained on twice. Make more tasks, lower rl.steps to "
            f"{num_tasks // tasks_per_step}, or allow tasks to be drawn again with curriculum.repeats=true"
        )


class Curriculum:
    """Pool that draws tasks and learns from the results of attempts; its state is part of every checkpoint."""

    def __init__(
        self,
        tasks: Sequence[Task],
        settings: CurriculumSettings | None = None,
        *,
        seed: int,
        attempts: int = 8,
        revalidate: Callable[[Task], bool] = lambda task: True,
        probe_share: float = PROBE_SHARE,
        even_share: float = EVEN_SHARE,
    ) -> None:
        """
        Args:
            attempts: number per task and step, the size of a group.
            revalidate: checks that a parked task is still valid, before it is tried again.
            probe_share: share of the draws that goes to retired tasks.
            even_share: share of the draws in which all tasks are alike.
        """
        self._settings, self._probe_share = settings or CurriculumSettings(), probe_share
        self._is_even, self._even_share = self._settings.kind == EVEN, even_share
        self._seed, self._attempts, self._revalidate = seed, attempts, revalidate
        self._tasks: dict[str, Task] = {}
        self._beliefs: dict[str, Belief] = {}
        self._difficulty: dict[str, float] = {}
        self._levels = Levels(())
        self._step, self._epoch = 0, 0
        self._offset, self._strength = 0.0, 4.0  # of the prior
        self._queue: list[str] = []
        self._repeated = 0
        self._quarantined: dict[str, str] = {}
        self.admit(tasks)

    # -- drawing -------------------------------------------------------------------------------------------------

    def draw(self, count: int) -> list[Task]:
        """The next `count` different tasks.

        Raises:
            RecipeError: fewer tasks than one step needs are left.
        """
        if reason := self.why_dry(count):
            raise RecipeError(reason)
        self._unpark()
        rng = random.Random(f"{self._seed}/draw/{self._step}")
        weights = self._weights()
        self._repeated = 0
        drawn: list[str] = []
        while len(drawn) < count:
            drawn.append(self._draw_one(rng, weights, drawn))
        for name in drawn:
            belief = self._beliefs[name]
            belief.uses = belief.uses * FADING_USE ** (self._step - belief.drawn) + 1
            belief.drawn = self._step
            self._repeated += belief.draws > 0
            belief.draws += 1
        self._step += 1
        return [self._tasks[name] for name in drawn]

    def _closed(self) -> set[str]:
        """Tasks that no step draws: those in quarantine and, in a single epoch, those that a step has drawn."""
        if self._settings.repeats:
            return set(self._quarantined)
        return {*self._quarantined, *(name for name, belief in self._beliefs.items() if belief.draws)}

    def why_dry(self, count: int) -> str:
        """Reason why a step cannot draw `count` tasks; "" if it can."""
        num_left = len(set(self._tasks) - self._closed())
        if num_left >= count:
            return ""
        pool, wanted = len(self._tasks), f"rl.tasks_per_step = {count}, but"
        if count > pool:
            return f"{wanted} there are only {pool} training tasks; make more tasks or lower it"
        reasons, remedies = [], ["Make more tasks"]
        if self._quarantined:
            causes = "; ".join(dict.fromkeys(self._quarantined.values()))
            reasons.append(f"{len(self._quarantined)} are in quarantine ({causes})")
            remedies = ["Remove the cause, make the tasks again and start another run"]
        if not self._settings.repeats:
            reasons.append(
                f"{sum(b.draws > 0 for b in self._beliefs.values())} were trained on in this epoch"
            )
            remedies.append("allow tasks to be drawn again with curriculum.repeats = true")
        return (
            f"{wanted} {num_left} of {pool} training tasks are left to draw: {', '.join(reasons)}. "
            f"{', or '.join(remedies)}"
        )

    @property
    def repeated(self) -> int:
        """Number of tasks of the last draw that earlier steps had drawn."""
        return self._repeated

    def _draw_one(self, rng: random.Random, weights: Mapping[str, float], drawn: list[str]) -> str:
        if not self._is_even:
            chance = rng.random()
            rest = {*drawn, *self._closed()}
            retired = [t for t, b in self._beliefs.items() if b.status == "retired" and t not in rest]
            if chance < self._probe_share and retired:
                return rng.choice(sorted(retired))
            if chance < 1 - self._even_share:
                target_paths = [self._tasks[name].target_path for name in drawn]
                remaining = {
                    name: weight / (1 + target_paths.count(self._tasks[name].target_path))
                    for name, weight in weights.items()
                    if name not in drawn
                }
                if sum(remaining.values()) > 0:
                    return rng.choices(list(remaining), list(remaining.values()))[0]
        closed = self._closed()
        for position, name in enumerate(self._queue):
            if name not in drawn and name not in closed:
                return self._queue.pop(position)
        self._queue = self._next_epoch(last=drawn)
        return self._queue.pop(0)

    def _next_epoch(self, *, last: Sequence[str]) -> list[str]:
        """All tasks in a new order, those of the current step last; parked and broken ones only if the others are too
        few."""
        closed = self._closed()
        order = sorted(name for name in self._tasks if name not in closed)
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        self._epoch += 1
        resting = {name for name, belief in self._beliefs.items() if belief.status in ("parked", "broken")}
        awake = [name for name in order if name not in resting]
        names = awake if len(awake) > len(last) else order
        return sorted(names, key=lambda name: name in last)

    def _weights(self) -> dict[str, float]:
        """Weight of every active task in the draw."""
        if self._is_even:
            return {}
        closed = self._closed()
        drawable = sorted(name for name in self._tasks if name not in closed)
        active = [name for name in drawable if self._beliefs[name].status == "active"]
        tokens = [b.tokens for b in self._beliefs.values() if b.tokens]
        mean_tokens = sum(tokens) / len(tokens) if tokens else 1.0
        weights: dict[str, float] = {}
        for name in active:
            belief, (a, b) = self._beliefs[name], self.posterior(name)
            worth = informative(a, b, self._attempts) + BONUS * deviation(a, b)
            worth += STALE * math.log1p(self._step - max(belief.seen, 0))
            uses = belief.uses * FADING_USE ** (self._step - belief.drawn)
            cost = math.sqrt((belief.tokens or mean_tokens) / mean_tokens)
            weights[name] = worth / cost / math.sqrt(1 + uses) * self._levels.share(self._cell(name))
        mass: dict[int, float] = {}
        for name, weight in weights.items():
            mass[self._tasks[name].level] = mass.get(self._tasks[name].level, 0.0) + weight
        factors = self._levels.capped(mass)
        return {name: weight * factors[self._tasks[name].level] for name, weight in weights.items()}

    # -- learning ------------------------------------------------------------------------------------------------

    def posterior(self, task_id: str) -> tuple[float, float]:
        """Parameters a and b of the posterior of the task's solve rate, with decayed counts."""
        belief = self._beliefs[task_id]
        decay = FORGET ** (self._step - belief.seen)
        prior_mean = sigmoid(self._offset - self._difficulty[task_id])
        a, b = self._strength * prior_mean, self._strength * (1 - prior_mean)
        return a + decay * belief.solved, b + decay * belief.failed

    def observe(self, verdicts: Iterable[Verdict], rollouts: Iterable[Rollout] = ()) -> None:
        """Update the estimates. Invalid verdicts, and those with an integrity problem, are skipped."""
        tokens = {r.id: r.counters["sampled_tokens"] + r.counters["context_tokens"] for r in rollouts}
        groups: dict[str, list[Verdict]] = {}
        for verdict in verdicts:
            if verdict.status == "graded" and not verdict.integrity and verdict.task_id in self._tasks:
                groups.setdefault(verdict.task_id, []).append(verdict)
        for name, group in groups.items():
            belief, solved = self._beliefs[name], sum(verdict.solved for verdict in group)
            decay = FORGET ** (self._step - belief.seen)
            belief.solved = decay * belief.solved + solved
            belief.failed = decay * belief.failed + len(group) - solved
            belief.attempts += len(group)
            belief.seen = self._step
            spent = [tokens[v.rollout_id] for v in group if v.rollout_id in tokens]
            if spent:
                mean = sum(spent) / len(spent)
                belief.tokens = mean if not belief.tokens else 0.7 * belief.tokens + 0.3 * mean
            self._levels.observe(self._cell(name), len(group), solved)
            self._settle(belief)
        tried = [
            (self._difficulty[t], b.solved + b.failed, b.solved)
            for t, b in self._beliefs.items()
            if b.attempts
        ]
        self._offset = level_offset(tried)
        self._strength = prior_strength(tried, self._offset)

    def _settle(self, belief: Belief) -> None:
        """Retire a solved task, park one that is never solved, and activate the others."""
        if self._is_even:
            return
        a, b = DOUBT + belief.solved, DOUBT + belief.failed
        belief.streak = belief.streak + 1 if 1 - below(SOLVED, a, b) > SURE else 0
        status: Status = "active"
        if belief.streak >= 2:
            status = "retired"
        elif belief.attempts >= MIN_ATTEMPTS and below(UNSOLVED, a, b) > SURE:
            status = "parked"
        if status != belief.status or status == "parked":
            belief.status, belief.since = status, self._step

    def _unpark(self) -> None:
        """Activate parked tasks after RETRY_STEPS, if they are still valid: a task that is never solved is often
        broken."""
        closed = self._closed()
        for name, belief in sorted(self._beliefs.items()):
            is_due = belief.status == "parked" and self._step - belief.since >= RETRY_STEPS
            if is_due and name not in closed:
                belief.status = "active" if self._revalidate(self._tasks[name]) else "broken"
                belief.since = self._step

    # -- the pool ------------------------------------------------------------------------------------------------

    def admit(self, tasks: Iterable[Task]) -> None:
        """Add tasks to the pool."""
        for task in tasks:
            self._tasks.setdefault(task.id, task)
            self._beliefs.setdefault(task.id, Belief(seen=self._step, drawn=self._step))
        self._difficulty = difficulties(self._tasks.values())

    def quarantine(self, tasks: Iterable[Task], reason: str) -> None:
        """Stop drawing these tasks: a cheat at them is confirmed."""
        self._quarantined |= {task.id: reason for task in tasks if task.id in self._tasks}
        self._queue = [name for name in self._queue if name not in self._quarantined]

    def solved(self) -> list[Task]:
        """Tasks that most attempts solve: parents of harder ones."""
        means = {name: self.posterior(name) for name in sorted(self._tasks) if self._beliefs[name].attempts}
        return [self._tasks[name] for name, (a, b) in means.items() if a > 0.6 * (a + b)]

    def unsolved(self) -> list[Task]:
        """Tasks that few attempts solve: parents of easier ones."""
        means = {name: self.posterior(name) for name in sorted(self._tasks) if self._beliefs[name].attempts}
        return [self._tasks[name] for name, (a, b) in means.items() if a < 0.2 * (a + b)]

    def need(self) -> Literal["harder", "easier", ""]:
        """Difficulty of the tasks that the pool lacks, by the mean solve rate; "" if it lacks none."""
        tried = [name for name, belief in self._beliefs.items() if belief.attempts]
        if len(tried) < min(8, len(self._tasks)):
            return ""
        rates = [a / (a + b) for a, b in map(self.posterior, tried)]
        mean = sum(rates) / len(rates)
        return "harder" if mean > BAND[1] else "easier" if mean < BAND[0] else ""

    def task(self, task_id: str) -> Task:
        return self._tasks[task_id]

    def status(self, task_id: str) -> Status:
        return self._beliefs[task_id].status

    def counts(self) -> dict[str, int]:
        """Number of tasks by status; those in quarantine are in no other count. The sum is the size of the pool."""
        counts: dict[str, int] = dict.fromkeys((*get_args(Status), "quarantined"), 0)
        for name, belief in self._beliefs.items():
            counts["quarantined" if name in self._quarantined else belief.status] += 1
        return counts

    def state(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "epoch": self._epoch,
            "queue": list(self._queue),
            "offset": self._offset,
            "strength": self._strength,
            "levels": self._levels.state(),
            "beliefs": {name: asdict(belief) for name, belief in self._beliefs.items()},
            "quarantined": dict(self._quarantined),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._step, self._epoch = state["step"], state["epoch"]
        self._offset, self._strength = state["offset"], state["strength"]
        self._queue = list(state["queue"])
        self._quarantined = dict(state["quarantined"])
        self._levels.restore(state["levels"])
        restored = {name: Belief(**values) for name, values in state["beliefs"].items()}
        self._beliefs = {name: restored.get(name, belief) for name, belief in self._beliefs.items()}

    def _cell(self, name: str) -> tuple[str, int]:
        task = self._tasks[name]
        return str(task.provenance.get("source", "")), task.level


def difficulties(tasks: Iterable[Task]) -> dict[str, float]:
    """Difficulty before any attempt: mean of the z-scores of level, hidden tests and length of the instruction.

    More hidden tests of behaviour make a task harder; a longer instruction makes it easier, so its sign is negative.
    """
    listed = list(tasks)
    columns = [
        [float(task.level) for task in listed],
        [math.log1p(len(task.behaviour_tests)) for task in listed],
        [-math.log1p(len(task.instruction)) for task in listed],
    ]
    scores = [_z(column) for column in columns]
    return {task.id: sum(row) / len(row) for task, row in zip(listed, zip(*scores, strict=True), strict=True)}


def _z(values: Sequence[float]) -> list[float]:
    mean = sum(values) / max(len(values), 1)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values), 1))
    return [(value - mean) / spread if spread > 1e-9 else 0.0 for value in values]
