"""Rules that keep the house small."""

from __future__ import annotations

from pathlib import Path

import pytest

import woodshed

PACKAGE = Path(woodshed.__file__).parent
MAX_LINES = 600
GRAB_BAGS = ("utils", "util", "common", "misc", "base", "helpers", "helper", "lib")


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix()
)
def test_a_module_stays_readable(path: Path):
    assert len(path.read_text("utf-8").splitlines()) <= MAX_LINES, "make it a folder of the same name"


def test_no_grab_bags():
    names = {part for path in PACKAGE.rglob("*") for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not names & set(GRAB_BAGS)


def test_importing_the_package_does_nothing():
    """The package's own file holds the ladder and the version, so importing it touches nothing."""
    code = compile((PACKAGE / "__init__.py").read_text("utf-8"), "woodshed", "exec")
    assert set(code.co_names) <= {"__doc__", "__version__", "__name__", "__annotations__"}
