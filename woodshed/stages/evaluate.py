"""The stage `evaluate`: the policy is measured on the held-out tasks."""

from __future__ import annotations

from woodshed.evals import effort, evaluation, suite
from woodshed.evals.evaluation import Evaluation
from woodshed.experience import Occasion
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.publish import publish
from woodshed.runs.folder import RunDir
from woodshed.stages.session import Session, refuse_stale


def run(session: Session, state: TrainState) -> None:
    """Measure the weights that the stage before left, as the first stage those that the recipe starts from."""
    publish(session.worker, session.engine, session.run.path / "weights", state.version)
    measure(session, state.version)


def measure(session: Session, version: int) -> None:
    """Measure the policy on the held-out tasks; without such tasks, nothing.

    The run folder keeps it under phase "eval" at step `version`, and the change of effort with difficulty since the
    first evaluation under phase "effort".

    Raises:
        RunError: attempts in the run folder are of other weights.
    """
    if not session.heldout:
        return
    recipe, run = session.recipe, session.run
    now = suite.evaluate(
        run,
        session.engine,
        session.heldout,
        recipe.harness,
        Occasion("eval", version, recipe.evaluation.attempts, recipe.seed),
        effort=recipe.evaluation.effort,
        progress=session.progress,
    )
    refuse_stale(run, [graded.rollout for graded in now.graded], version)
    record_effort(run, now)


def record_effort(run: RunDir, now: Evaluation) -> None:
    """Keep the change of effort with difficulty since the run's first evaluation."""
    first = now if now.step == 0 else evaluation.from_run(run)[0]
    if first.step < now.step:
        change = effort.change(first.graded, now.graded)
        run.once("metrics", dict, "effort", now.step, lambda: [change])
