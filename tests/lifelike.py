"""A run folder as training leaves it, of any size, written through the real records.

What the attempts read is source of this machine's standard library, so texts are as varied and as compressible as the
real thing; attempts at one task read the same files, as they do. The same arguments give the same folder.
"""

from __future__ import annotations

import random
import re
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from woodshed.evals import summarize
from woodshed.records import (
    Call,
    Environment,
    ErrorKind,
    Flag,
    Hint,
    Observation,
    Outcome,
    Patch,
    Rollout,
    Task,
    TokenDivergence,
    Turn,
    Verdict,
)
from woodshed.runs.folder import RunDir
from woodshed.tasks import folder

FAULTS: tuple[ErrorKind, ...] = ("bad_arguments", "bad_path", "old_missing")
WAVE = 32  # rollouts written at a time
PIECE = re.compile(r"\s?\w{1,7}|\s+|[^\w\s]{1,3}")
FORM = "<call>edit_file package/module.py\n<<<<\nold\n====\nnew\n>>>>\n</call>"
HINT = f"Reminder: edit_file takes exactly these arguments:\n{FORM}"


@dataclass(frozen=True)
class Shape:
    """How big a run is."""

    tasks: int = 4
    steps: int = 3
    tasks_per_step: int = 2
    attempts: int = 2
    turns: int = 4
    observed_chars: int = 500

    @property
    def rollouts(self) -> int:
        return self.steps * self.tasks_per_step * self.attempts + 2 * self.tasks * self.attempts


BIG = Shape(tasks=100, steps=80, tasks_per_step=10, attempts=5, turns=20)


class Writer:
    """Writes attempts; knows the tokens that it has used."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.random = shape, random.Random(seed)
        self.ids: dict[str, int] = {}
        library = Path(sysconfig.get_paths()["stdlib"])
        self.sources = [p.read_text("utf-8", errors="replace") for p in sorted(library.glob("*.py"))]

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.ids.setdefault(piece, len(self.ids)) for piece in PIECE.findall(text))

    def logps(self, count: int) -> tuple[float, ...]:
        """Four of five tokens are nearly certain, as of a warmed-up policy."""
        draw = self.random
        return tuple(
            -draw.expovariate(0.8) if draw.random() < 0.2 else -draw.random() * 1e-3 for _ in range(count)
        )

    def turn(self, task: int, number: int, step: int, *, skill: float) -> Turn:
        draw = self.random
        source = self.sources[(3 * task + draw.randrange(3)) % len(self.sources)]
        at = (
            draw.randrange(6) * self.shape.observed_chars % max(len(source) - 1, 1)
        )  # attempts read the same windows
        seen = source[at : at + self.shape.observed_chars]
        path = f"package/module_{task % 17}.py"
        if number % 3 == 2:
            mine = self.sources[draw.randrange(len(self.sources))]
            cut = draw.randrange(max(len(mine) - 160, 1))
            old, new = seen[:80], mine[cut : cut + 160]
            raw = f"<call>edit_file {path}\n<<<<\n{old}\n====\n{new}\n>>>>\n</call>"
            call = Call("call_0", "edit_file", {"path": path, "old": old, "new": new}, raw)
            seen = f"edited {path} at line {draw.randrange(400)}"
        else:
            raw = f"<call>read_file {path} {at} 40</call>"
            call = Call("call_0", "read_file", {"path": path, "start": at, "count": 40}, raw)
        kind = draw.choice(FAULTS) if draw.random() > skill else None
        ids = self.tokens(raw)
        context = tuple(draw.randrange(49_000) for _ in range(self.shape.observed_chars // 3))
        return Turn(
            context_ids=context,
            opening=4,
            sampled_ids=ids,
            logps=self.logps(len(ids)),
            versions=((step, len(ids)),),
            finish_reason="stop",
            text=raw,
            calls=(call if kind is None else Call("call_0", call.tool, {}, raw, kind),),
            observations=(Observation("call_0", seen if kind is None else f"error: {kind}", kind, 0.01),),
            error_kind=kind,
            sample_s=0.4,
            tools_s=0.01,
        )

    def attempt(
        self, phase: str, step: int, task: Task, number: int, attempt: int
    ) -> tuple[Rollout, Verdict]:
        skill = min(0.75 + 0.05 * step, 0.95)
        turns = tuple(self.turn(number, i, step, skill=skill) for i in range(self.shape.turns))
        name = f"{phase}-{step}-{task.name}-{attempt}"
        head = "--- a/package/module.py\n+++ b/package/module.py\n@@ -1,2 +1,2 @@\n"
        diff = f"{head}-    raise\n+{turns[-1].text[:80]}\n"
        patch = Patch({"package/module.py": "x\n"}, diff=diff)
        made = Rollout(name, task.id, task.name, attempt, 0, turns, patch, "finished", 9.5)
        solved = self.random.random() < 0.2 + 0.02 * step - 0.1 * task.level
        outcomes: dict[str, Outcome] = {t: "passed" if solved else "failed" for t in task.fail_to_pass}
        outcomes |= dict.fromkeys(task.pass_to_pass, "passed")
        judged = Verdict(
            name, task.id, "graded", float(solved), solved, outcomes, detail="1 failed\n" * (not solved)
        )  # type: ignore[arg-type]
        return made, judged


def make_run(path: Path, shape: Shape = Shape(), *, seed: int = 0, settings: str = "") -> RunDir:
    """The run folder. `settings` are further lines of its recipe, such as "[feedback]\\nweight = 0.0"."""
    writer = Writer(shape, seed)
    recipe = f'name = "{path.name}"\nnote = "Made up, in the shape of a real run."\nseed = {seed}\n\n'
    recipe += f"[rl]\nsteps = {shape.steps}\n\n{settings}\n"
    run = RunDir.create(path, recipe=recipe, manifest={"python": "3.11", "seed": seed})
    tasks = [write_task(path / "tasks" / "train" / f"package-stub-name_{n}", n) for n in range(shape.tasks)]
    for step in range(shape.steps + 1):
        if step in (0, shape.steps):
            write_step(run, writer, "eval", step, list(enumerate(tasks)))
        if step < shape.steps:
            first = step * shape.tasks_per_step
            drawn = [(n % shape.tasks) for n in range(first, first + shape.tasks_per_step)]
            write_step(run, writer, "train", step, [(n, tasks[n]) for n in drawn])
    run.append("token_texts", [{str(i): piece for piece, i in writer.ids.items()}], "train", 0)
    run.unlock()
    return run


def write_step(run: RunDir, writer: Writer, phase: str, step: int, tasks: Sequence[tuple[int, Task]]) -> None:
    made = [
        writer.attempt(phase, step, task, n, attempt)
        for n, task in tasks
        for attempt in range(writer.shape.attempts)
    ]
    rollouts, verdicts = [rollout for rollout, _ in made], [verdict for _, verdict in made]
    hints = [
        Hint(rollout.id, n, str(turn.error_kind), HINT)
        for rollout in rollouts
        for n, turn in enumerate(rollout.turns)
        if turn.error_kind
    ]
    for part in range(0, len(rollouts), WAVE):
        run.append("rollouts", rollouts[part : part + WAVE], phase, step, part=part // WAVE)
        run.append("verdicts", verdicts[part : part + WAVE], phase, step, part=part // WAVE)
    run.append("hints", hints, phase, step)
    run.append("flags", [Flag(rollouts[-1].id, "reads_hidden_tests", 1, "cat /tests", 0.9)], phase, step)
    metrics = summarize(rollouts, verdicts)
    if phase == "train":
        turns = {rollout.id: rollout.turns for rollout in rollouts}
        run.append(
            "divergences",
            [taught(writer, h, turns[h.rollout_id][h.turn]) for h in hints[:96]],
            phase,
            step,
        )
        metrics |= {"kl_loss": 0.3 / (1 + step), "rl_grad_norm": 0.5, "kl_grad_norm": 0.2, "entropy": 0.4}
        metrics |= {"seconds": {"attempts": 40.0 + step, "update": 9.0}}
    run.append("metrics", [metrics], phase, step)


def taught(writer: Writer, hint: Hint, turn: Turn) -> TokenDivergence:
    """The hint makes every third token of the turn much less likely."""
    teacher = tuple(p - 2.5 if i % 3 == 0 else p * 0.9 for i, p in enumerate(turn.logps))
    gaps = tuple(abs(p - q) / 4 for p, q in zip(turn.logps, teacher, strict=True))
    return TokenDivergence(hint.rollout_id, hint.turn, hint.detector, turn.logps, teacher, gaps)


def write_task(path: Path, number: int) -> Task:
    """A small valid task."""
    tests = b"def test_name():\n    pass\n"
    task = Task(
        id="",
        name=path.name,
        folder=path,
        instruction=f"Implement name_{number} in package/module.py, lines 1-2.",
        environment=Environment("3.11", (), ("package",)),
        allowed_paths=("package/module.py",),
        fail_to_pass=("tests/test_module.py::test_name",),
        pass_to_pass=tuple(f"tests/test_module.py::test_other[{i}]" for i in range(30)),
        operator="stub",
        level=number % 3,
        target_path="package/module.py",
        target_symbol=f"name_{number}",
        target_lines=(1, 2),
        test_command="python -m pytest -q",
    )
    gold = {"package/module.py": f"def name_{number}():\n    return {number}\n".encode()}
    with tempfile.TemporaryDirectory() as workspace:
        module = Path(workspace) / "package" / "module.py"
        module.parent.mkdir()
        module.write_text(f"def name_{number}():\n    raise NotImplementedError\n")
        return folder.write(
            task, path, workspace=Path(workspace), tests={"tests/test_module.py": tests}, gold=gold
        )
