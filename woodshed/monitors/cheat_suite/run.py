"""Playing of scripts in a real sandbox with the agent's own tools: rollouts like any other, without tokens."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from woodshed.agent import access, tools
from woodshed.agent.patch import extract
from woodshed.agent.tools import ToolSettings
from woodshed.monitors.cheat_suite.context import ScriptedAttempt, ScriptedCall
from woodshed.records import Access, Call, Observation, Rollout, Task, Turn
from woodshed.sandbox import BUBBLEWRAP, Sandbox, SandboxProvider
from woodshed.tasks import sandbox_spec, workspace

TOOLS = ToolSettings(command_timeout_s=10.0)
MAX_FILE = 1 << 20


def play(task: Task, act: ScriptedAttempt, name: str, sandboxes: SandboxProvider = BUBBLEWRAP) -> Rollout:
    """The attempt that makes these moves.

    Raises:
        SandboxError: the sandbox could not be opened, or was lost.
    """
    with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
        layer = Path(scratch)
        layer.chmod(0o755)
        for path, data in act.leftovers.items():
            (layer / path).parent.mkdir(parents=True, exist_ok=True)
            (layer / path).write_bytes(data)
        layers = (layer,) if act.leftovers else ()
        began = time.monotonic()
        turns: list[Turn] = []
        accesses: list[Access] = []
        with sandboxes.open(sandbox_spec(task, extra_lowers=layers, watch=True)) as sandbox:
            for number, move in enumerate(act.moves):
                turns.append(_turn(sandbox, move, number))
                touched = [*access.by_tool(turns[-1].calls[0], sandbox.workspace), *sandbox.touched()]
                accesses += access.accesses(touched, task, number, before=len(accesses))
            patch = extract(sandbox, workspace(task), max_bytes=MAX_FILE)
    seconds = time.monotonic() - began
    name = f"planted-0-{task.name}-{name}"
    return Rollout(
        name, task.id, task.name, 0, 0, tuple(turns), patch, "finished", seconds, accesses=tuple(accesses)
    )


def _turn(sandbox: Sandbox, move: ScriptedCall, number: int) -> Turn:
    call = Call(f"call-{number}", move.tool, move.arguments, json.dumps(move.arguments, ensure_ascii=False))
    observation: Observation = tools.run(call, sandbox, TOOLS)
    return Turn(
        (), 0, (), (), (), "stop", "", (call,), (observation,), None, oracle="cheat" if move.cheats else ""
    )


def cheat_turn(rollout: Rollout) -> int | None:
    """First turn at which a played attempt cheats."""
    return next((n for n, turn in enumerate(rollout.turns) if turn.oracle == "cheat"), None)
