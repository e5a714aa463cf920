"""What the harness adds to a turn: everything but the model's time and the command's own run time.

That is: build the request, read the message, carry the call into the sandbox and its result back, record the turn and
render it for the next one. Messages are scripted; the tokenizer, the sandbox and the tools are the real ones.

    python benchmarks/harness_overhead.py [--turns 160] [--model smollm2-135m]

Bar: at most 5 ms per turn (median over all turns).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from woodshed.agent import TOOLS, AgentSettings, Attempt
from woodshed.engines.engine import Sample
from woodshed.records import Environment, Task
from woodshed.runs import machine
from woodshed.sandbox import Result, SandboxSpec, open_sandbox
from woodshed.tasks import workspace
from woodshed.tokens import model_files
from woodshed.tokens.renderer import Renderer, create_renderer

BAR_MS = 5.0
CONTEXTS = (500, 16_000)
"""Prompt lengths at which turns are measured, in tokens."""


class Watched:
    """A sandbox that adds up how long its commands ran."""

    def __init__(self, sandbox: Any) -> None:
        self._sandbox, self.command_s = sandbox, 0.0

    def exec(self, *arguments: Any, **options: Any) -> Result:
        result = self._sandbox.exec(*arguments, **options)
        self.command_s += result.seconds
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


def messages(renderer: Renderer) -> dict[str, str]:
    """One message per kind of turn; the edit and its reverse take turns."""

    def call(tool: str, **arguments: Any) -> str:
        return renderer.codec.format(tool, arguments, TOOLS)

    return {
        "read_file": call("read_file", path="package/module_7.py", start=200, count=40),
        "edit_file": call(
            "edit_file", path="package/module_7.py", old="value_123 = 123", new="value_123 = 0"
        ),
        "edit back": call(
            "edit_file", path="package/module_7.py", old="value_123 = 0", new="value_123 = 123"
        ),
        "write_file": call("write_file", path="package/new.py", content="x = 1\n" * 50),
        "search": call("search", pattern="value_12[0-3]", path="package"),
        "shell": call("shell", command="echo done"),
        "unknown tool": "<call>view package/module_7.py</call>",
        "no call": "The work is done.",
    }


def practice_task(folder: Path) -> Task:
    """A repository of 40 files with 500 lines each."""
    package = folder / "environment" / "workspace" / "package"
    package.mkdir(parents=True)
    for number in range(40):
        lines = (f"value_{n} = {n}\n" for n in range(500))
        (package / f"module_{number}.py").write_text("".join(lines))
    empty: dict[str, Any] = {"fail_to_pass": (), "pass_to_pass": (), "allowed_paths": ("package",)}
    return Task(
        id="0" * 16,
        name="overhead",
        folder=folder,
        instruction="Work.",
        environment=Environment("3.11", (), ("package",)),
        operator="stub",
        level=1,
        target_path="package/module_7.py",
        target_symbol="value_123",
        target_lines=(124, 124),
        test_command="true",
        **empty,
    )


def measure(task: Task, renderer: Renderer, turns: int, context: int) -> dict[str, list[float]]:
    """Overhead of each turn in milliseconds, by kind of turn."""
    found: dict[str, list[float]] = {}
    kinds = list(messages(renderer).items())
    settings = AgentSettings(max_turns=10**6, rollout_tokens=10**9).model_copy(update={"max_errors": 10**6})
    with open_sandbox(SandboxSpec(lowers=(workspace(task),))) as opened:
        sandbox: Any = Watched(opened)
        for number in range(turns):
            if (
                number % (2 * len(kinds)) == 0
            ):  # a fresh attempt now and then, so that the context stays as long as it is
                attempt = Attempt(
                    padded(task, renderer, context), sandbox, renderer, settings, rollout_id="bench"
                )
            kind, text = kinds[number % len(kinds)]
            ids = renderer.encode_message(text)
            sample = Sample(ids, (0.0,) * len(ids), "stop", ((0, len(ids)),))
            before, started = sandbox.command_s, time.perf_counter()
            attempt.request()
            attempt.act(sample)
            spent = time.perf_counter() - started - (sandbox.command_s - before)
            found.setdefault(kind, []).append(1000 * spent)
    return found


def padded(task: Task, renderer: Renderer, context: int) -> Task:
    """The task with an instruction that makes the prompt about `context` tokens long."""
    words = "one more word of instruction "
    repeats = context // len(renderer.encode_message(words))
    return replace(task, instruction=words * repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the harness adds to a turn.")
    parser.add_argument("--turns", type=int, default=160, help="turns measured per context length")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "harness_overhead.json"
    )
    options = parser.parse_args()
    source = model_files.resolve(options.model)
    tokenizer = AutoTokenizer.from_pretrained(source.directory, gguf_file=source.gguf)
    renderer = create_renderer(tokenizer, codec="plain")
    rows: list[dict[str, Any]] = []
    everything: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        task = practice_task(Path(scratch) / "overhead")
        for context in CONTEXTS:
            for kind, times in measure(task, renderer, options.turns, context).items():
                everything += times
                rows.append(row(kind, context, times))
    rows.append(row("all", 0, everything))
    print(f"{'turn':<14}{'context':>8}{'p50 ms':>9}{'p90 ms':>9}{'turns':>7}")
    for line in rows:
        print(
            f"{line['turn']:<14}{line['context'] or '':>8}{line['p50_ms']:>9}{line['p90_ms']:>9}{line['turns']:>7}"
        )
    verdict = "holds" if rows[-1]["p50_ms"] <= BAR_MS else "MISSED"
    print(f"bar: p50 over all turns <= {BAR_MS} ms: {verdict}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"bar_ms": BAR_MS, "rows": rows, "machine": machine.describe()}, indent=2) + "\n"
    )


def row(kind: str, context: int, times: list[float]) -> dict[str, Any]:
    p90 = sorted(times)[int(0.9 * (len(times) - 1))]
    return {
        "turn": kind,
        "context": context,
        "p50_ms": round(statistics.median(times), 2),
        "p90_ms": round(p90, 2),
        "turns": len(times),
    }


if __name__ == "__main__":
    main()
