"""The choice of tasks that a recipe names, opened and asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from woodshed.curriculum.choice import KIND, TaskChoice
from woodshed.curriculum.pool import Curriculum, CurriculumSettings
from woodshed.parts import misfit, wrong_result
from woodshed.records import RecipeError, Task


def create(
    tasks: Sequence[Task],
    settings: CurriculumSettings,
    *,
    seed: int,
    attempts: int,
    revalidate: Callable[[Task], bool] = lambda task: True,
) -> TaskChoice:
    """Open the choice that settings name; arguments as `choice.OpenChoice`.

    Raises:
        RecipeError: one of the user's own cannot be used, or has a state that no checkpoint can hold.
    """
    function = KIND.resolve(settings.kind) or Curriculum
    choice = function(tasks, settings, seed=seed, attempts=attempts, revalidate=revalidate)
    if isinstance(choice, Curriculum):
        return choice
    if fault := misfit(choice, TaskChoice):
        raise RecipeError(f"curriculum {settings.kind!r} opened a {type(choice).__name__}, which {fault}")
    state = choice.state()
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"curriculum {settings.kind!r} has a state that is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise wrong_result("curriculum", settings.kind, state, "a dict as its state")
    return choice


def draw(choice: TaskChoice, tasks: Sequence[Task], count: int) -> list[Task]:
    """The next tasks, checked.

    Args:
        tasks: those that a choice of the user's own was opened with.

    Raises:
        RecipeError: fewer tasks than one step needs are left, or something else than different tasks was drawn.
    """
    drawn = choice.draw(count)
    if isinstance(choice, Curriculum):  # whose pool may have grown
        return drawn
    names = [getattr(task, "id", None) for task in drawn] if isinstance(drawn, list | tuple) else []
    if len(names) != count or len(set(names) & {task.id for task in tasks}) != count:
        raise wrong_result("curriculum", type(choice).__name__, drawn, f"{count} different tasks of this run")
    return list(drawn)
