"""Terminal output of the commands: progress, aligned columns, the next command.

Answers go to stdout; progress and advice go to stderr, so that a pipe carries the answer only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from woodshed.runs.pace import WORTH_TELLING_S, Pace, duration
from woodshed.tokens.quoting import HIDDEN

Progress = Callable[[int, int, str], None]
"""progress(done, total, text): the text names a stage, then details after a comma, as `parts` tells."""


def say(text: str) -> None:
    """Print a line of the answer."""
    print(harmless(text))


def tell(text: str) -> None:
    """Print advice, a warning or progress to stderr."""
    print(harmless(text), file=sys.stderr)


def harmless(text: str) -> str:
    """Hidden characters as their codes: names and messages come from foreign repositories, models and policies."""
    return HIDDEN.sub(lambda match: _code(ord(match[0])), text)


def _code(character: int) -> str:
    return f"\\x{character:02x}" if character < 0x100 else f"\\u{character:04x}"


def say_next(command: str) -> None:
    """Print the command to run next."""
    tell(f"next: {command}")


def say_columns(table: Sequence[Sequence[str]]) -> None:
    """Print rows of text in aligned columns."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def progress_bars(every_s: float = 30.0) -> Iterator[Progress]:
    """Progress: a bar for the current stage at a terminal; elsewhere lines when a stage begins, lasts long or ends."""
    if not sys.stderr.isatty():
        lines = _Lines()
        lines.EVERY_S = every_s
        yield lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        drawn = _Bar(bars)
        yield drawn
        drawn.end()


STAGE = re.compile(r"(?:\([^()]*\)|,(?! )|[^,])*")
"""Text up to the first comma before a space and outside of brackets: no figure is cut at its comma."""


def parts(text: str) -> tuple[str, str]:
    """Stage and details of a progress text: "update 4 of 8 (33% invalid, reward 0.02)", "about 6 min left"."""
    stage = STAGE.match(text)
    end = stage.end() if stage else 0
    return text[:end], text[end:].removeprefix(", ")


class _Lines:
    """Progress for logs."""

    EVERY_S = 30.0

    def __init__(self) -> None:
        self.stage, self.pace, self.told_s = "", Pace(0), 0.0

    def __call__(self, done: int, total: int, text: str) -> None:
        stage, _ = parts(text)
        of = f": {done}/{total}" if total else ""
        if stage != self.stage:
            self.stage, self.pace, self.told_s = stage, Pace(done), 0.0
            if not (total and done):  # a stage may take long: say at once what is waited for
                tell(f"{text}{of}")
                return
        seconds = self.pace.seconds()
        finished = done >= total and seconds > WORTH_TELLING_S
        if finished or seconds - self.told_s > self.EVERY_S:
            self.told_s = seconds
            left = self.pace.left(done, total)
            tell(f"{text}{of} after {duration(seconds)}{f', {left}' if left else ''}")


class _Bar:
    """Progress for people."""

    def __init__(self, bars: Any) -> None:
        self.bars, self.stage, self.detail, self.bar, self.pace = bars, "", "", None, Pace(0)

    def __call__(self, done: int, total: int, text: str) -> None:
        stage, detail = parts(harmless(text))
        if stage != self.stage:
            self.end()
            self.stage, self.pace = stage, Pace(done)
            self.bar = self.bars.add_task(stage, total=total or None, detail="")
        self.detail = detail
        shown = ", ".join(part for part in (self.pace.left(done, total), detail) if part)
        self.bars.update(self.bar, completed=done, total=total or None, detail=shown)

    def end(self) -> None:
        """Remove the bar; a stage that took a while leaves a line."""
        if self.bar is None:
            return
        seconds = self.pace.seconds()
        if seconds > WORTH_TELLING_S:
            said = ", ".join(part for part in (self.stage, self.detail) if part)
            self.bars.console.print(f"{said}: {duration(seconds)}", markup=False, highlight=False)
        self.bars.remove_task(self.bar)
        self.bar = None
