"""The commands of `woodshed`.

Each command imports what it needs inside its function, so that `woodshed --help` answers at once. A person's mistake
is a `WoodshedError`; only here does it become one message and exit code 2.

Exit codes:
    0: done.
    1: the answer is no or incomplete: a task that is not proven, a source without tasks, a machine that cannot do it,
        runs that may not be compared, records that could not be read.
    2: a mistake in the request.
    3: an engine or a sandbox failed half way; finished work is kept.
    130: interrupted.
"""

from woodshed.cli import measure, runs, tasks
from woodshed.cli.app import app

__all__ = ["app", "main", "measure", "runs", "tasks"]


def main() -> None:
    """The `woodshed` command."""
    app()
