"""What a thief gets for a task: its loot pasted in, judged by the verifier that judges attempts. It must be nothing."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from woodshed import syntax
from woodshed.grading.verifier import verify
from woodshed.records import Patch, SandboxError, Task
from woodshed.sandbox import SandboxSpec, open_sandbox
from woodshed.synthesis.leaks import evidence, prints
from woodshed.synthesis.leaks.scan import LIBRARY, with_programs
from woodshed.tasks import folder
from woodshed.tasks.environment import sandbox_spec

MAX_TRIES = 6
"""Patches that are judged for one task."""


@dataclass(frozen=True)
class Theft:
    """How a thief did."""

    task: str
    reward: float
    """The best that any of its patches earned."""
    trick: str
    """By which, "" where it found nothing that earned anything."""
    tricks: dict[str, int]
    """Every trick it played, to how many definitions that found."""
    tried: int
    """Patches that were judged, the empty one included."""


def steal(
    task: Task, *, spec: Callable[[Task], SandboxSpec] = sandbox_spec, timeout_s: float = 900.0
) -> Theft:
    """Lets the thief loose in the task's sandbox and judges what it brings.

    Raises:
        SandboxError: the thief did not come to its end.
    """
    wanted = [body for body in evidence.bodies(task) if body.kind == "gold" and body.source]
    request = {
        "names": sorted({body.name for body in wanted}),
        "paths": sorted(folder.gold_patch(task).files),
        "packages": list(task.environment.packages),
        "distribution": task.environment.distribution,
    }
    with open_sandbox(with_programs(spec(task), ("prints.py", "readers.py", "thief.py"))) as sandbox:
        result = sandbox.exec(
            ["/env/bin/python", "-P", "-s", "-B", "-m", "woodshed.synthesis.leaks.thief"],
            env={"PYTHONPATH": f"{LIBRARY}:{spec(task).env.get('PYTHONPATH', '')}"},
            stdin=json.dumps(request).encode(),
            timeout_s=timeout_s,
            channel=True,
        )
    lines = [json.loads(line) for line in result.channel.decode("utf-8", errors="replace").splitlines()]
    if result.outcome != "ok":
        why = result.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxError(f"{task.name}: the thief ended early, {result.outcome}: {why}")
    best = Theft(task.name, 0.0, "", {line["trick"]: len(line["loot"]) for line in lines}, 0)
    tried = 0
    for trick, patch in _patches(task, {body.name: body.place for body in wanted}, lines):
        tried += 1
        reward = verify(task, patch).reward
        if reward > best.reward:
            best = Theft(task.name, reward, trick, best.tricks, tried)
        if reward == 1.0 or tried == MAX_TRIES:
            break
    return Theft(task.name, best.reward, best.trick, best.tricks, tried)


def _patches(
    task: Task, places: dict[str, tuple[str, str]], lines: list[dict[str, Any]]
) -> Iterator[tuple[str, Patch]]:
    """The different patches that the loot allows, and the empty one."""
    yield "", Patch({})
    seen: set[str] = set()
    pool = [(line["trick"], loot) for line in lines for loot in line["loot"]]
    for trick, first in pool:
        files: dict[str, str | None] = {}
        missing = dict(places)
        for loot in [first, *(loot for name, loot in pool if name == trick), *(loot for _, loot in pool)]:
            if "text" in loot:
                if loot["path"] not in files:
                    files[loot["path"]] = loot["text"]
                    missing = {n: place for n, place in missing.items() if place[0] != loot["path"]}
            elif loot["name"] in missing and "text" not in first:
                path, dotted = missing.pop(loot["name"])
                files[path] = _pasted(files.get(path) or _shown(task, path), dotted, loot)
        if (key := json.dumps(files, sort_keys=True)) not in seen:
            seen.add(key)
            yield trick, Patch(files)


def _pasted(text: str, dotted: str, loot: dict[str, str]) -> str:
    """A file with a stolen definition in the place of the stub, else at the end of its class or of the file."""
    try:
        tree = syntax.parse(text)
    except (SyntaxError, ValueError):
        return text
    stub = dict(prints.functions(tree)).get(dotted)
    lines = syntax.plain(text).split("\n")
    if "code" in loot:  # the whole stolen module, run over this one
        return f"{text}\nimport base64, marshal\n\nexec(marshal.loads(base64.b64decode({loot['code']!r})), globals())\n"
    source = loot["source"]
    if stub is not None:
        begin, end, indent = stub.lineno - 1, stub.end_lineno or stub.lineno, stub.col_offset
    else:
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        home = next((node for node in classes if dotted == f"{node.name}.{loot['name']}"), None)
        begin = end = (home.end_lineno or home.lineno) if home else len(lines)
        indent = home.body[0].col_offset if home else 0
    block = [" " * indent + line if line else line for line in source.rstrip().split("\n")]
    return "\n".join([*lines[:begin], *block, *lines[end:]]) + "\n" * (stub is None)


def _shown(task: Task, path: str) -> str:
    file = task.folder / "environment" / "workspace" / path
    return syntax.legible(file.read_bytes()) if file.is_file() else ""
