"""The warm-up: oracle attempts whose every message is scripted, made with the real tools, then imitated (SFT).

The deleted code is known, so the right attempt can be written down: read the place, edit, run the tests, finish. On
top of that, three things are planted, because of what two prototypes measured (docs/decisions.md):

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
import math
import random
import re
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field, field_validator, model_validator

from woodshed import feedback
from woodshed.agent.attempt import AgentSettings, Attempt
from woodshed.agent.prompt import system_prompt, user_prompt
from woodshed.agent.tools import TOOLS
from woodshed.engines.engine import Sample
from woodshed.learning import packing
from woodshed.learning.packing import Row, rollout_row
from woodshed.learning.policy import Policy
from woodshed.learning.update import OptimizerSettings, learning_rate
from woodshed.pysource import syntax
from woodshed.records import Hint, RecipeError, Rollout, Task, TaskError, Turn
from woodshed.runs.folder import RunDir
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.settings import Settings
from woodshed.tasks import environment, folder
from woodshed.tokens.codec import Codec
from woodshed.tokens.renderer import Renderer
from woodshed.tokens.token_kinds import text_positions

PLANTS: dict[str, float] = {
    "unknown_tool": 0.45,
    "bad_arguments": 0.10,
    "unparseable": 0.15,
    "old_missing": 0.10,
    "untested": 0.20,
}
"""Fault classes that can be planted, and their shares."""


class SFTSettings(Settings):
    """Supervised steps on oracle attempts before RL."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps of imitation; 0 skips the warm-up."""
    attempts: int = Field(default=2, ge=1)
    """Oracle attempts made per training task, each with its own plants."""
    batch: int = Field(default=32, ge=1)
    """Oracle attempts in one optimizer step."""
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-3, warmup_steps=5, decay_share=0.4)
    """1e-3 suits a new rank-8 adapter, 1e-5 full weights."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Positions in one forward-backward, padding included."""
    rename: bool = True
    """Imitate each attempt under made-up names of the file, the function and its class, and other line numbers (where
    they are all above 60), others every time around, so that a small model learns to copy them from the task instead
    of recalling those it was warmed up on."""
    code_share: float = Field(default=1.0, ge=0, le=1)
    """Share of attempts whose code is imitated too; of the others where they edit and in what form, and the rest."""
    repair_share: float = Field(default=0.25, ge=0, le=1)
    """Share of attempts that edit wrongly first, see the tests fail and repair."""
    read_before: int = Field(default=0, ge=0)
    """Lines above the gap from which oracle attempts read on: what a method needs of its class stands there."""
    read_lines: int = Field(default=4, ge=1, le=60)
    """Lines that they read in all, more than `read_before`."""
    reminder_share: float = Field(default=0.4, ge=0, le=1)
    """Share of turns with a reminder before them."""
    seeded_fault_share: float = Field(default=0.0, ge=0, le=1)
    """Share of turns replaced by a planted fault. Above 0 the policy learns to err: say so beside every result."""
    plants: dict[str, Annotated[float, Field(gt=0)]] = Field(default=PLANTS, min_length=1)
    """Classes of fault that are planted, with their weights."""

    @model_validator(mode="after")
    def _reads_the_gap(self) -> SFTSettings:
        if self.read_lines <= self.read_before:
            raise ValueError(
                f"read_lines = {self.read_lines} from {self.read_before} lines above the gap on never shows it; "
                f"give read_lines = {self.read_before + 1} or more"
            )
        return self

    @field_validator("plants")
    @classmethod
    def _can_be_planted(cls, plants: dict[str, float]) -> dict[str, float]:
        if unknown := set(plants) - set(PLANTS):
            raise ValueError(
                f"{', '.join(sorted(unknown))} cannot be planted; choose from {', '.join(PLANTS)}"
            )
        return plants


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

WORDS = """
access archive arrays assets backend batch blocks buffers builders cache calendar canvas catalog channels
charts checks clients clock codecs colors columns config convert cursor dates decode diffs digest dispatch
encode engine events export fields files filters fonts format frames graph grid groups handlers hashing
headers history images index input items jobs keys labels layers layout ledger links loader locale locks logs
maps markup masks matrix merge messages metrics models names nodes numbers objects options output pages parser
paths patterns plugins points pools ports profile query queue ranges reader records regions registry render
report request resolve rules runner sample schema scope search series sessions shapes signals slices slots
sorting spans state storage streams strings styles tables tags tasks text theme tokens tools tracks trees
types units values vectors views weights widgets window words worker writer zones
""".split()
"""What made-up modules, folders and functions are called, half the time."""

SYLLABLES = """
ba bel bo cal chi cor da del do el fa fi fun gar glo hum in jas ka ki lar lo lu mar mi mo mun na nel ni no ol pa per
pi po quo ra rel ri ro sa sem si sor ta tel ti to tri tul u va vel vi vo wa wen xi ya zo
""".split()
ENDINGS = ("", "", "", "s", "utils", "tools", "kit", "lib", "lang", "ify", "er", "io", "2")
"""Invented words are spelled from these: names of real packages are seldom one token, and must be copied too."""

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
    renderer: Renderer,
    settings: SFTSettings,
    agent: AgentSettings,
    *,
    seed: int,
    threads: int,
    context_length: int,
    progress: Callable[[int, int, str], None],
    sandboxes: SandboxProvider = BUBBLEWRAP,
) -> list[ExpertAttempt]:
    """Oracle attempts at every task, kept in the run folder task by task and never played twice."""
    usable = [task for task in tasks if len(folder.gold_patch(task).files) == 1]
    if not usable:
        raise RecipeError(
            f"the warm-up has nothing to imitate: none of the {len(tasks)} tasks of tasks.train is solved in one file; "
            "set tasks.train, or sft.steps = 0"
        )
    played: list[ExpertAttempt] = []

    def attempts(task: Task) -> list[ExpertAttempt]:
        return [
            expert_attempt(
                task,
                renderer,
                settings,
                agent,
                attempt=n,
                seed=seed,
                context_length=context_length,
                sandboxes=sandboxes,
            )
            for n in range(settings.attempts)
        ]

    kept = {task.id: run.find("oracle", ExpertAttempt, "sft", 0, part=i) for i, task in enumerate(usable)}
    with ThreadPoolExecutor(threads) as pool:
        pending = {task.id: pool.submit(attempts, task) for task in usable if kept[task.id] is None}
        for part, task in enumerate(usable):
            made = kept[task.id]
            if made is None:
                made = pending[task.id].result()
                run.append("oracle", made, "sft", 0, part=part)
            played += made
            progress(part + 1, len(usable), "oracle attempts")
    return played


def imitate(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Row],
    step: int,
    settings: SFTSettings,
) -> dict[str, float]:
    """One step of SFT: mean negative log-prob over every imitated token of the step's attempts. A gradient that is not
    finite moves nothing."""
    tokens = sum(len(row.wanted) for row in rows)
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for chunk in packing.row_batches(rows, settings.micro_batch_tokens):
        padded = packing.pad(chunk, policy.device)
        logp_BN = policy.logps(padded, 1.0)
        loss = -(logp_BN * padded.mask_BN).sum() / tokens
        loss.backward()
        losses.append(
            loss.detach()
        )  # asked for at the end: a device does not wait for the next one's launches
    norm = float(torch.nn.utils.clip_grad_norm_(policy.trainable.values(), settings.optimizer.max_grad_norm))
    rate = learning_rate(settings.optimizer, step, settings.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "sft_loss": sum(map(float, losses)),
        "grad_norm": norm,
        "learning_rate": rate,
        "sft_tokens": float(tokens),
    }


def draw(count: int, batch: int, step: int, seed: int) -> list[tuple[int, int]]:
    """(attempt, time around) that step `step` imitates: every attempt once before any twice, each time shuffled."""
    chosen: list[tuple[int, int]] = []
    for position in range(step * batch, (step + 1) * batch):
        around, index = divmod(position, count)
        order = list(range(count))
        random.Random(f"{seed}/{around}").shuffle(order)
        chosen.append((order[index], around))
    return chosen


def expert_attempt(
    task: Task,
    renderer: Renderer,
    settings: SFTSettings,
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
        agent,
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
    task: Task, codec: Codec, settings: SFTSettings, agent: AgentSettings, rng: random.Random
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
            kind, reminder = _draw_reminder(fault, tool, settings, task, codec, rng)
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
    settings: SFTSettings,
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


def read_from(task: Task, settings: SFTSettings) -> int:
    """The first line that an oracle attempt reads."""
    return max(1, task.target_lines[0] - settings.read_before)


@dataclass(frozen=True)
class Edit:
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
            f"{task.name}: its gold change spans {len(gold)} files; an oracle attempt needs one edit"
        )
    return path, syntax.read(path, folder.original(task, path).read_bytes()), after


def unique_edit(before: str, after: str) -> Edit:
    """The change between two texts as one replacement of whole lines that occur once, with little context."""
    old, new = before.split("\n"), after.split("\n")
    blocks = [
        b for b in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if b[0] != "equal"
    ]
    (_, i1, _, j1, _), (_, _, i2, _, j2) = blocks[0], blocks[-1]
    while True:
        text = "\n".join(old[i1:i2])
        if text.strip() and before.count(text) == 1:
            return Edit(text, "\n".join(new[j1:j2]))
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


def rows(
    played: Sequence[ExpertAttempt],
    tasks: Sequence[Task],
    renderer: Renderer,
    step: int,
    settings: SFTSettings,
    agent: AgentSettings,
    *,
    seed: int,
) -> list[Row]:
    """What step `step` imitates, as training rows, under made-up names where the settings say so."""
    known = {task.id: task for task in tasks}
    made: list[Row] = []
    for index, around in draw(len(played), settings.batch, step, seed):
        attempt = played[index]
        if settings.rename:
            task, spelling = known[attempt.rollout.task_id], f"{seed}/{around}"
            attempt = renamed(attempt, task, renderer, settings, max_calls=agent.max_calls, seed=spelling)
        code = random.Random(f"{seed}/{around}/{attempt.rollout.id}/code").random() < settings.code_share
        made.append(sft_row(attempt, renderer, code=code))
    return made


def sft_row(oracle: ExpertAttempt, renderer: Renderer, *, code: bool = True) -> Row:
    """The attempt as a training row, reminders inserted; every message counts but slips, and none of the harness's
    tokens do. Without `code`, what edits write does not count either, also where a planted fault spoils the edit."""
    turns = oracle.rollout.turns
    reminders = {hint.turn: renderer.hint(hint.text) for hint in oracle.reminders}
    unwanted = {index for index, turn in enumerate(turns) if turn.oracle == SLIP}
    written = {
        call.arguments.get("new") or call.arguments.get("content") for turn in turns for call in turn.calls
    }
    texts = sorted(str(text) for text in written if text)
    masked = {} if code else {n: text_positions(turn, texts, renderer) for n, turn in enumerate(turns)}
    return rollout_row(oracle.rollout, reminders=reminders, without=unwanted, masked=masked)


def renamed(
    oracle: ExpertAttempt,
    task: Task,
    renderer: Renderer,
    settings: SFTSettings,
    *,
    max_calls: int,
    seed: str,
) -> ExpertAttempt:
    """The same attempt about another place: made-up file, test file, function and line numbers, consistently.

    The transcript is rendered anew, so its tokens are what they would be had the names been these.
    """
    rollout = oracle.rollout
    say = renaming(task, settings, random.Random(f"{seed}/{rollout.id}/names"))
    context = renderer.start(system_prompt(max_calls=max_calls), say(user_prompt(task)), TOOLS)
    turns: list[Turn] = []
    for turn in rollout.turns:
        text = say(turn.text)
        ids = renderer.encode_message(text)
        seen = tuple(replace(observation, text=say(observation.text)) for observation in turn.observations)
        calls = tuple(
            replace(call, raw=say(call.raw), arguments=_each(say, call.arguments)) for call in turn.calls
        )
        changed = {
            "text": text,
            "calls": calls,
            "sampled_ids": ids,
            "logps": (0.0,) * len(ids),
            "observations": seen,
        }
        turns.append(replace(turn, context_ids=context.ids, opening=context.opening, **changed))
        context = renderer.extend(ids, "stop", seen, calls)
    reminders = tuple(replace(hint, text=say(hint.text)) for hint in oracle.reminders)
    return ExpertAttempt(replace(rollout, turns=tuple(turns)), reminders)


def _each(say: Callable[[str], str], arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: say(value) if isinstance(value, str) else value for name, value in arguments.items()}


def renaming(task: Task, settings: SFTSettings, rng: random.Random) -> Callable[[str], str]:
    """A function that puts the same made-up names and numbers into every text of an attempt."""
    target, tests = _made_up_paths(rng)
    places = {task.target_path: target}
    for test_file in (word for word in shlex.split(task.test_command) if word.endswith(".py")):
        places[test_file] = tests
    owner, _, short = task.target_symbol.rpartition(".")
    name = "_".join(_made_up_word(rng) for _ in range(rng.randint(1, 3)))
    made_up = "".join(_made_up_word(rng).title() for _ in range(rng.randint(1, 2))) if owner else ""
    symbol = f"{made_up}.{name}" if owner else name
    for form in ("`{}`", '("{}")', '(\\"{}\\")'):
        places[form.format(task.target_symbol)] = form.format(symbol)
    places[f"def {short}("] = f"def {name}("
    if owner:
        places[owner] = made_up
    first, gap = read_from(task, settings), task.target_lines[0]
    lines = len(folder.original(task, task.target_path).read_bytes().splitlines())
    if first > 60:  # smaller numbers are counts of other things too
        shift = rng.randint(61 - first, 1500)
        for number in (first, gap, min(first + settings.read_lines - 1, lines), lines):
            places[str(number)] = str(number + shift)
    wanted = "|".join(
        rf"(?<!\w){'(?<![.])' * old.isdigit()}{re.escape(old)}(?!\w)"
        if old.isdigit() or old == owner
        else re.escape(old)
        for old in sorted(places, key=len, reverse=True)
    )
    return lambda text: re.sub(wanted, lambda found: places[found[0]], text)


def _made_up_paths(rng: random.Random) -> tuple[str, str]:
    """(module, test file) laid out as repositories are: nested, flat, under src, or a package in one file."""
    package, module = _made_up_word(rng), _made_up_word(rng)
    inner = [_made_up_word(rng) for _ in range(rng.randint(0, 1))]
    root = rng.choice([[], [], [], ["src"]])
    stem, parts = rng.choice(
        [
            (module, [*root, package, *inner, f"{module}.py"]),
            (module, [*root, package, *inner, f"{module}.py"]),
            (package, [*root, package, f"{package}.py"]),
            (package, [*root, package, "__init__.py"]),
            (module, [f"{module}.py"]),
        ]
    )
    tested = rng.choice([stem, stem, package, _made_up_word(rng)])
    tests = rng.choice([["tests"], ["tests"], ["test"], [], [package, "tests"]])
    return "/".join(parts), "/".join([*tests, f"test_{tested}.py"])


def _made_up_word(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(WORDS)
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))) + rng.choice(ENDINGS)


def _draw_fault(tool: str, settings: SFTSettings, rng: random.Random) -> str:
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
    fault: str, tool: str, settings: SFTSettings, task: Task, codec: Codec, rng: random.Random
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
        named = rng.choice([spec.name for spec in TOOLS])
    else:
        return "placebo", rng.choice(feedback.PLACEBOS)
    text = feedback.hint_text(kind, tools=TOOLS, codec=codec, tool=named, test_command=task.test_command)
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
