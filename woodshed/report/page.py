"""One readable page per run: report.html, self-contained, no network, no scripts.

Everything in it came from a policy, a repository or a log, so it is hostile until proven otherwise: Jinja2 escapes
every value, control characters become visible symbols, and the page's own policy forbids scripts and requests.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from woodshed import __version__
from woodshed.evals import measures
from woodshed.records import RunError
from woodshed.report import curves
from woodshed.report.gather import MAX_TRANSCRIPTS, gather
from woodshed.rundir import RunDir, write_atomically

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def write(run: RunDir) -> Path:
    """Write `report.html` into the run folder and return its path. Works while the run is going on.

    Raises:
        RunError: the run was written by another version, or the page cannot be written.
    """
    path = run.path / "report.html"
    text = render(run)
    try:
        write_atomically(path, text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def render(run: RunDir) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("woodshed.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    environment.globals.update(
        measures=measures,
        width=curves.WIDTH,
        height=curves.HEIGHT,
        max_transcripts=MAX_TRANSCRIPTS,
        version=__version__,
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    return environment.get_template("page.html.j2").render(page=gather(run))


def visible(text: object) -> str:
    """Text whose escape sequences, control and direction-changing characters can be seen instead of obeyed."""
    return _HIDDEN.sub(lambda hidden: _symbol(hidden[0]), str(text))


def _symbol(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"
