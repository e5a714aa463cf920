"""Scripted expert attempts: every message written down beforehand, and played with the real tools.

The deleted code is known, so the right attempt can be written: read around the gap, edit, run the tests, finish. Three
things are planted on top, because of what two prototypes measured (docs/decisions.md):

- *Repairs*: a share of attempts slips in its first edit, sees the tests fail, and repairs. Without them a small
  model finishes on failing tests. The slip itself is not imitated.
- *Reminders* (hint literacy): before a share of turns stands a reminder. Where it names the fault that was planned
  for the turn, the turn is right; where it is about something else (placebo, another class), the turn keeps its
  fault. So the policy learns what a reminder says, not that reminders mean "be right". A policy that was never
  shown reminders gets *worse* under a hint, and training on it destroys it.
- *Seeded faults*: optional, for demonstrations on models too small to make natural ones often enough to measure.
  They teach the model to err at a known rate; whoever reads results must be told (recipes say it in their first lines).
"""

from __future__ import annotations

import difflib
import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from woodshed import feedback
from woodshed.agent.attempt import AgentSettings, Attempt
from woodshed.agent.tools import TOOLS
from woodshed.engines.engine import Sample
from woodshed.pysource import syntax
from woodshed.records import Hint, RecipeError, Rollout, Task, TaskError
from woodshed.runs.folder import RunDir
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.settings import Settings
from woodshed.tasks import environment, folder
from woodshed.tokens.codec import Codec, ToolSpec
from woodshed.tokens.renderer import Renderer

PLANTS: dict[str, float] = {
    "unknown_tool": 0.45,
    "bad_arguments": 0.10,
    "unparseable": 0.15,
    "old_missing": 0.10,
    "untested": 0.20,
}
"""Fault classes that can be planted, and their shares."""


class ExpertSettings(Settings):
    """Scripted attempts: how many, and what is planted in them."""

    attempts: int = Field(default=2, ge=1)
    """Scripted attempts per training task, each with its own plants."""
    repair_share: ClassVar[float] = 0.25
    """Share of attempts that edit wrongly first, see the tests fail and repair."""
    read_before: int = Field(default=0, ge=0, le=50)
    """Lines above the gap from which scripted attempts read on: what a method needs of its class stands there. They
    read on to the tenth line from the gap on, and where this is 0 to the fourth. Chosen on the quickstart's model of
    135M on two cores, which pays for every token; the experiment reads from 30 lines above."""
    reminder_share: float = Field(default=0.4, ge=0, le=1)
    """Share of turns with a reminder before them. Chosen on two prototypes, in which a policy that never saw reminders
    got worse under a hint."""
    seeded_fault_share: float = Field(default=0.0, ge=0, le=1)
    """Share of turns replaced by a planted fault. Above 0 the policy learns to err: say so beside every result."""
    plants: dict[str, Annotated[float, Field(gt=0)]] = Field(default=PLANTS, min_length=1)
    """Classes of fault that are planted, with their weights."""

    @field_validator("plants")
    @classmethod
    def _can_be_planted(cls, plants: dict[str, float]) -> dict[str, float]:
        if unknown := set(plants) - set(PLANTS):
            raise ValueError(
                f"{', '.join(sorted(unknown))} cannot be planted; choose from {', '.join(PLANTS)}"
            )
        return plants

    @property
    def read_lines(self) -> int:
        """Lines that scripted attempts read in all."""
        return self.read_before + 10 if self.read_before else 4


@dataclass(frozen=True)
class Move:
    """One scripted message."""

    text: str
    fault: str = ""
    """Class of the planted fault, or "" for the right move."""
    reminder: str = ""
    """Text of the reminder that stands before it, or ""."""
    reminder_class: str = ""


@dataclass(frozen=True)
class ExpertAttempt:
    """A scripted attempt as it really went, and the reminders that stood before its turns."""

    rollout: Rollout
    reminders: tuple[Hint, ...]


SLIP = "slip"
"""What a wrong first edit is called: it is there to be repaired, and the one right-looking message not imitated."""

LENIENT = tuple(replace(tool, parameters={**tool.parameters, "required": []}) for tool in TOOLS)
"""The tools as a careless caller sees them, for writing calls that lack an argument."""

TOOL_NAMES = ("read_file", "shell", "edit_file", "finish")
"""Tools that scripted attempts call."""

WRONG_TOOLS = (
    "run_tests",
    "open_file",
    "view",
    "replace",
    "bash",
    "python",
    "cat",
    "apply_patch",
    "list_files",
)


def play(
    run: RunDir,
    tasks: Sequence[Task],
    perform: Callable[[Task, int], ExpertAttempt],
    *,
    attempts: int,
    threads: int,
    progress: Callable[[int, int, str], None],
) -> list[ExpertAttempt]:
    """Perform scripted attempts at every task, kept in the run folder task by task and never performed twice.

    Args:
        perform: makes the attempt of a number at a task, as `expert_attempt` does.
        attempts: attempts at each task.

    Raises:
        RecipeError: no task is solved in one file.
    """
    usable = [task for task in tasks if len(folder.gold_patch(task).files) == 1]
    if not usable:
        raise RecipeError(
            f"sft has nothing to imitate: none of the {len(tasks)} tasks of tasks.train is solved in one file; "
            "set tasks.train, or take 'scripted' out of sft.imitate"
        )
    kept = {task.id: run.find("oracle", ExpertAttempt, "sft", 0, part=i) for i, task in enumerate(usable)}
    played: list[ExpertAttempt] = []
    with ThreadPoolExecutor(threads) as pool:
        pending = {
            task.id: pool.submit(lambda task=task: [perform(task, number) for number in range(attempts)])
            for task in usable
            if kept[task.id] is None
        }
        for part, task in enumerate(usable):
            performed = kept[task.id]
            if performed is None:
                performed = pending[task.id].result()
                run.append("oracle", performed, "sft", 0, part=part)
            played += performed
            progress(part + 1, len(usable), "scripted attempts")
    return played


def expert_attempt(
    task: Task,
    renderer: Renderer,
    settings: ExpertSettings,
    agent: AgentSettings,
    *,
    attempt: int,
    seed: int,
    context_length: int,
    sandboxes: SandboxProvider = BUBBLEWRAP,
) -> ExpertAttempt:
    """Play one scripted attempt through the real tools in a real sandbox.

    Raises:
        TaskError: the gold change cannot be written as one edit.
    """
    name = f"oracle-0-{task.name}-{attempt}"
    rng = random.Random(f"{seed}/{name}")
    sandbox = sandboxes.open(environment.sandbox_spec(task))
    player = Attempt(
        task,
        sandbox,
        renderer,
        agent.model_copy(update={"summary_tokens": 0}),  # a script writes none
        rollout_id=name,
        attempt=attempt,
        seed=seed,
        context_length=context_length,
    )
    played: list[Move] = []
    try:
        for move in script(task, renderer.codec, settings, agent, rng):
            if player.done:
                break
            ids = renderer.encode_message(move.text)
            player.act(Sample(ids, (0.0,) * len(ids), "stop", ((0, len(ids)),)), oracle=move.fault)
            played.append(move)
    finally:
        rollout = player.finish()
    reminders = tuple(
        Hint(name, index, move.reminder_class, move.reminder)
        for index, move in enumerate(played)
        if move.reminder
    )
    return ExpertAttempt(rollout, reminders)


def script(
    task: Task, codec: Codec, settings: ExpertSettings, agent: AgentSettings, rng: random.Random
) -> list[Move]:
    """The messages of one attempt: the right moves, with plants and reminders strewn in."""
    repair = rng.random() < settings.repair_share
    right = right_moves(task, codec, settings, agent, repair=repair, rng=rng)
    moves: list[Move] = []
    for tool, text, slip in right:
        if len(moves) >= agent.max_turns - 1 and tool != "finish":
            break  # faults have eaten the budget
        fault = _draw_fault(tool, settings, rng)
        if rng.random() < settings.reminder_share:
            kind, reminder = _draw_reminder(fault, tool, settings, task, codec, rng, agent.tools.specs)
            if kind == fault:
                fault = ""
        else:
            kind, reminder = "", ""
        if not fault:
            moves.append(Move(text, slip, reminder, kind))
            continue
        moves.append(Move(_faulty(fault, tool, text, task, codec, rng), fault, reminder, kind))
        if fault == "untested":  # it finished instead of testing
            return moves
        if len(moves) < agent.max_turns - 1:
            moves.append(Move(text, slip))
    return moves


def right_moves(
    task: Task,
    codec: Codec,
    settings: ExpertSettings,
    agent: AgentSettings,
    *,
    repair: bool,
    rng: random.Random,
) -> list[tuple[str, str, str]]:
    """(tool, message, "" or SLIP) of an attempt without plants: read, edit, test, finish; or a wrong edit first."""
    path, before, after = gold_change(task)
    lines = {"start": read_from(task, settings), "count": settings.read_lines}
    read = codec.format("read_file", {"path": path, **lines}, TOOLS)
    test = codec.format("shell", {"command": task.test_command}, TOOLS)
    steps = [before, broken(before, after, rng), after] if repair else [before, after]
    moves = [("read_file", read, "")]
    for old, new in itertools.pairwise(steps):
        edit = unique_edit(old, new)
        message = codec.format("edit_file", {"path": path, "old": edit.old, "new": edit.new}, TOOLS)
        moves += [("edit_file", message, "" if new == after else SLIP), ("shell", test, "")]
    return [*moves, ("finish", codec.format("finish", {}, TOOLS), "")]


def lines_written(task: Task) -> int:
    """Lines that a scripted attempt's edit writes; 0 where no single edit solves the task."""
    if len(folder.gold_patch(task).files) != 1:
        return 0
    _, before, after = gold_change(task)
    return len(unique_edit(before, after).new.splitlines())


def read_from(task: Task, settings: ExpertSettings) -> int:
    """The first line that a scripted attempt reads."""
    return max(1, task.target_lines[0] - settings.read_before)


@dataclass(frozen=True)
class TextEdit:
    """One exact replacement of whole lines."""

    old: str
    new: str


def gold_change(task: Task) -> tuple[str, str, str]:
    """(path, text now, text with the gold patch) of the one file that the gold patch changes.

    Raises:
        TaskError: the gold change touches several files.
    """
    gold = folder.gold_patch(task).files
    path, after = next(iter(gold.items()))
    if len(gold) != 1 or after is None:
        raise TaskError(
            f"{task.name}: its gold change spans {len(gold)} files; a scripted attempt needs one edit"
        )
    return path, syntax.read(path, folder.original(task, path).read_bytes()), after


def unique_edit(before: str, after: str) -> TextEdit:
    """The change between two texts as one replacement of whole lines that occur once, with little context."""
    old, new = before.split("\n"), after.split("\n")
    blocks = [
        b for b in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if b[0] != "equal"
    ]
    (_, i1, _, j1, _), (_, _, i2, _, j2) = blocks[0], blocks[-1]
    while True:
        text = "\n".join(old[i1:i2])
        if text.strip() and before.count(text) == 1:
            return TextEdit(text, "\n".join(new[j1:j2]))
        if i1 > 0:
            i1, j1 = i1 - 1, j1 - 1
        if i2 < len(old):
            i2, j2 = i2 + 1, j2 + 1


def broken(before: str, after: str, rng: random.Random) -> str:
    """The right change with one slip that any test run shows: an unclosed bracket or a lost indent."""
    edit = unique_edit(before, after)
    new = edit.new.split("\n")
    slip = rng.choice([line for line in new if line.strip()])
    bad = slip[1:] if slip.startswith(" ") and rng.random() < 0.5 else slip + " ("
    return before.replace(edit.old, edit.new.replace(slip, bad, 1))


def _draw_fault(tool: str, settings: ExpertSettings, rng: random.Random) -> str:
    if rng.random() >= settings.seeded_fault_share:
        return ""
    possible = {
        fault: share
        for fault, share in settings.plants.items()
        if fault not in ("unparseable", "old_missing", "untested")
        or (fault == "untested" and tool == "shell")
        or (fault in ("unparseable", "old_missing") and tool == "edit_file")
    }
    return rng.choices(list(possible), weights=list(possible.values()))[0] if possible else ""


def _draw_reminder(
    fault: str,
    tool: str,
    settings: ExpertSettings,
    task: Task,
    codec: Codec,
    rng: random.Random,
    tools: Sequence[ToolSpec],
) -> tuple[str, str]:
    """(class, text): half the time about the planned fault, else about another class or nothing at all.

    The other class may be one that is never planted: a policy that had met none of those took each for its own
    (docs/log.md, the gate). The planted ones are in the draw twice, since they are the ones to be told apart.

    A reminder of a call's form names the tool that the fault would have called, or any: never the right one because it
    is right, or the policy learns that a reminder says what to call. One that was taught so dragged its students into
    reading files where they had to finish (docs/log.md).
    """
    draw = rng.random()
    if fault and draw < 0.5:
        kind, named = fault, _called_carelessly(tool) if fault == "bad_arguments" else tool
    elif draw < 0.8:
        kind = rng.choice([k for k in (*settings.plants, *feedback.CLASSES) if k != fault])
        named = rng.choice([spec.name for spec in tools])
    else:
        return "placebo", rng.choice(feedback.PLACEBOS)
    text = feedback.hint_text(kind, tools=tools, codec=codec, tool=named, test_command=task.test_command)
    return kind, text


def _called_carelessly(tool: str) -> str:
    """The tool that a call without its arguments names, where a call of `tool` would have been right."""
    return tool if tool in ("edit_file", "shell") else "read_file"


def _faulty(fault: str, tool: str, right: str, task: Task, codec: Codec, rng: random.Random) -> str:
    """The message that commits a fault where `right` would have been right."""
    if fault == "unknown_tool":
        return right.replace(tool, rng.choice(WRONG_TOOLS), 1)
    if fault == "bad_arguments":
        arguments = {"path": task.target_path} if tool == "edit_file" else {}
        return codec.format(_called_carelessly(tool), arguments, LENIENT)
    if fault == "unparseable":
        fence = "\n>>>>"
        return right.replace(fence, "", 1) if fence in right else "".join(right.rsplit("}", 1))
    if fault == "old_missing":
        path, before, after = gold_change(task)
        arguments = {"path": path, "old": "    pass", "new": unique_edit(before, after).new}
        return codec.format("edit_file", arguments, TOOLS)
    return codec.format("finish", {}, TOOLS)
