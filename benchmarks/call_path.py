"""Files that a reader opens one after the other, from the command `woodshed train` to a line that matters.

    python benchmarks/call_path.py RECIPE [SECTION.KEY=VALUE ...] --out benchmarks/results/call_path.json

The recipe is trained in this process, and the stack is kept at the first loss of each kind and at the first message of
an attempt: the files of Woodshed in it, from the one of the command on. typer and `cli/app.py`, which every command
passes, lie before.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import woodshed
from woodshed.agent import attempt
from woodshed.cli import app
from woodshed.learning import losses
from woodshed.learning.metrics import Metrics
from woodshed.runs import machine

PACKAGE = Path(woodshed.__file__).parent
COMMAND = "cli/train.py"


def files_here(*called: str) -> list[str]:
    """Files of Woodshed on the stack, from the one of the command on, and that of a function about to be called, each
    once."""
    names = [Path(name) for name in (*(frame.filename for frame in traceback.extract_stack()), *called)]
    inside = [name.relative_to(PACKAGE).as_posix() for name in names if name.is_relative_to(PACKAGE)]
    return list(dict.fromkeys(inside[inside.index(COMMAND) :]))


@contextmanager
def watched(owner: Any, name: str, see: Callable[..., object]) -> Iterator[None]:
    """Let `see` look at the arguments of a function before each of its calls."""
    called = getattr(owner, name)

    def seen(*args: Any, **kwargs: Any) -> Any:
        see(*args, **kwargs)
        return called(*args, **kwargs)

    with patch.object(owner, name, seen):
        yield


def measure(arguments: list[str]) -> dict[str, list[str]]:
    """Run `woodshed train` with these arguments, and return the files on the way to each line, by its name."""
    paths: dict[str, list[str]] = {}

    def at_loss(_metrics: Metrics, **values: Any) -> None:
        for key in ("ce_loss", "rl_loss", "kl_loss"):
            if key in values:  # the caller has just computed it
                paths.setdefault(key, files_here())

    def at_call(name: str, module: ModuleType) -> Callable[..., object]:
        return lambda *_, **__: paths.setdefault(name, files_here(str(module.__file__)))

    with ExitStack() as stack:
        stack.enter_context(watched(Metrics, "add", at_loss))
        stack.enter_context(watched(losses, "policy_gradient", at_call("formula", losses)))
        stack.enter_context(watched(attempt.Attempt, "request", at_call("attempt", attempt)))
        app(["train", *arguments], standalone_mode=False)
    return paths


def main() -> None:
    """Print the files, and write them as JSON."""
    parser = argparse.ArgumentParser(description="Count the files between the command and a line.")
    parser.add_argument("arguments", nargs="+", help="as of `woodshed train`")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    paths = measure(options.arguments)
    for name, files in paths.items():
        print(f"{name:8} {len(files)}  {' > '.join(files)}")
    if options.out:
        what = "files of woodshed on the stack, from the command `woodshed train` to the line"
        report = {"what": what, "paths": paths, "machine": machine.describe()}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
