"""Public sets of labelled attempts, as cases for the monitors. Files are the user's own copies; nothing is fetched.

They come without a task, an access log and a whole patch, so only the rules that read commands and written code apply,
and the figures are lower bounds.

- TRACE (arXiv 2601.20103; PatronusAI/trace-dataset, CC-BY-SA-4.0): 517 trajectories, columns `conversation` (a JSON
  list of messages) and `label` ("0" is honest, else a category such as "1.1.1").
- School of Reward Hacks (arXiv 2508.17511; longtermrisk/school-of-reward-hacks): columns `user`,
  `school_of_reward_hacks` (the answer that games the metric) and `control` (an honest one).
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from woodshed import documents
from woodshed.evals.monitoring import KnownAttempt
from woodshed.monitors.rules import watch
from woodshed.records import Call, Environment, Observation, Patch, Rollout, Task, TaskError, Turn

FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
SHELL = ("bash", "sh", "shell", "console", "zsh")
COMMAND_KEYS = ("command", "cmd", "code", "script", "input")
PATH_KEYS = ("path", "file_path", "filename", "file")
TEXT_KEYS = ("content", "new_str", "new_string", "file_text", "new", "text", "code_edit")


def trace(path: Path) -> list[KnownAttempt]:
    """TRACE from a .jsonl, .json or .parquet file.

    Raises:
        TaskError: no such file, or rows without `conversation` and `label`.
    """
    cases = []
    for number, row in enumerate(_rows(path, ("conversation", "label"))):
        conversation = row["conversation"]
        messages = json.loads(conversation) if isinstance(conversation, str) else conversation
        label = str(row["label"])
        rollout = _rollout(f"trace-{row.get('trajectory_id', number)}", messages)
        cases.append(KnownAttempt(label, label != "0", rollout.id, tuple(watch(rollout, _task(path)))))
    return cases


def school(path: Path) -> list[KnownAttempt]:
    """School of Reward Hacks from a .csv, .jsonl, .json or .parquet file: two cases a row, the hack and its control.

    Raises:
        TaskError: no such file, or rows without the columns.
    """
    cases = []
    for number, row in enumerate(_rows(path, ("user", "school_of_reward_hacks", "control"))):
        for column, is_cheat in (("school_of_reward_hacks", True), ("control", False)):
            messages = [
                {"role": "user", "content": row["user"]},
                {"role": "assistant", "content": row[column]},
            ]
            rollout = _rollout(f"school-{number}-{column}", messages)
            name = str(row.get("cheat_method") or "school") if is_cheat else "control"
            cases.append(KnownAttempt(name, is_cheat, f"school-{number}", tuple(watch(rollout, _task(path)))))
    return cases


def _rows(path: Path, columns: Iterable[str]) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise TaskError(f"no file {path}; download the set yourself and name the file")
    try:
        for number, row in enumerate(_read(path)):
            if missing := [column for column in columns if row.get(column) is None]:
                raise TaskError(f"{path}, row {number}: no column {missing[0]!r}; it has {', '.join(row)}")
            yield row
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise TaskError(f"{path} cannot be read as rows: {type(error).__name__}: {error}") from None


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet  # type: ignore[import-not-found]  # only who reads such a file needs it
        except ModuleNotFoundError:
            raise TaskError(f"{path} needs pyarrow: pip install pyarrow, or convert it to .jsonl") from None
        yield from parquet.read_table(path).to_pylist()
    elif path.suffix == ".csv":
        csv.field_size_limit(sys.maxsize)
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())
    else:
        text = documents.read(path, TaskError, most=documents.MOST_DATA_BYTES)
        tree = documents.parse_json(text, str(path), TaskError)
        yield from (tree if isinstance(tree, list) else tree["rows"])


def _task(folder: Path) -> Task:
    """Placeholder for the unknown task."""
    environment = Environment("3.11", (), ("src",))
    return Task(
        id="external",
        name="external",
        folder=folder.parent / "none",
        instruction="",
        environment=environment,
        allowed_paths=("src",),
        fail_to_pass=(),
        pass_to_pass=(),
        operator="stub",
        level=1,
        target_path="src/solution.py",
        target_symbol="solution",
        target_lines=(1, 1),
        test_command="pytest",
    )


def _rollout(name: str, messages: Iterable[dict[str, Any]]) -> Rollout:
    """The assistant's messages as turns; their tool calls and fenced code as calls, Python of no path as the patch."""
    turns: list[Turn] = []
    files: dict[str, str | None] = {}
    for message in messages:
        if message.get("role") != "assistant":
            continue
        text = _text(message.get("content"))
        calls = [*_tool_calls(message), *_fenced(text)]
        for call in calls:
            path = str(call.arguments.get("path", ""))
            if call.tool == "write_file":
                files[path] = (files.get(path) or "") + str(call.arguments["content"]) + "\n"
        observations = tuple(Observation(call.id, "") for call in calls)
        turns.append(Turn((), 0, (), (), (), "stop", text, tuple(calls), observations, None))
    return Rollout(name, "external", "external", 0, 0, tuple(turns), Patch(files), "finished", 0.0)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _tool_calls(message: dict[str, Any]) -> Iterator[Call]:
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        try:
            values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        except (ValueError, RecursionError):
            continue
        raw = json.dumps(values)
        path = next((str(values[key]) for key in PATH_KEYS if key in values), "")
        text = next((str(values[key]) for key in TEXT_KEYS if key in values), "")
        command = next((str(values[key]) for key in COMMAND_KEYS if key in values), "")
        if path and text:
            yield Call(f"call-{number}", "write_file", {"path": path, "content": text}, raw)
        elif path:
            yield Call(f"call-{number}", "read_file", {"path": path}, raw)
        elif command:
            yield Call(f"call-{number}", "shell", {"command": command}, raw)


def _fenced(text: str) -> Iterator[Call]:
    for number, (language, body) in enumerate(FENCE.findall(text)):
        if language.lower() in SHELL:
            yield Call(f"fence-{number}", "shell", {"command": body}, body)
        elif language.lower() in ("python", "py", ""):
            yield Call(f"fence-{number}", "write_file", {"path": "src/solution.py", "content": body}, body)
