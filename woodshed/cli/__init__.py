"""The commands of `woodshed`.

Each command imports what it needs inside its function, so that `woodshed --help` answers at once. A user's mistake
is a `WoodshedError`, which only this package turns into one message and exit code 2.

Exit codes:
    0: done.
    1: the answer is no or incomplete: an unproven task, a source without tasks, a machine that lacks something, runs
        that may not be compared, records that could not be read.
    2: a mistake in the request.
    3: an engine or a sandbox failed during the work; finished work is kept.
    130: interrupted.
"""

import os

from woodshed.cli import asynchronous, init, measure, red_team, runs, serve, settings, solve, tasks, train
from woodshed.cli.app import app

__all__ = [
    "app",
    "asynchronous",
    "init",
    "main",
    "measure",
    "red_team",
    "runs",
    "serve",
    "settings",
    "solve",
    "tasks",
    "train",
]


def main() -> None:
    """The `woodshed` command."""
    # Libraries of Hugging Face draw bars of their own over ours; this switches them off here and in child processes.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    app()
