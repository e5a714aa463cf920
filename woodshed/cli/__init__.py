"""The verbs a person types.

Each verb imports its rooms inside its function, so that `woodshed --help` answers at once. Whatever goes wrong because
of a person's mistake is a `WoodshedError`; it becomes one message and exit code 2 here and nowhere else.

Exit codes: 0 done; 1 the answer is no, or not whole (a task that is not proven, a source that gives none, a machine
that cannot do it, runs that may not be compared, records that could not be read); 2 a mistake in what was asked; 3 an
engine or sandbox failed half way, and what was finished is kept; 130 interrupted.
"""

from woodshed.cli import measure, runs, tasks
from woodshed.cli.app import app

__all__ = ["app", "main", "measure", "runs", "tasks"]


def main() -> None:
    """The `woodshed` command."""
    app()
