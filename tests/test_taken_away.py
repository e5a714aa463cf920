"""What can be taken away from small packages, and what cannot, as it also stands elsewhere."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path

import pytest
from test_synthesis import lay

from woodshed import synthesis
from woodshed.synthesis import harden

SETTINGS = synthesis.SynthesisSettings(jobs=2, timeout_s=300, operators=("stub", "remove"))
MODULE = "def twice(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
SUITE = "def test_twice(): assert twice(2) == 4\ndef test_half(): assert half(2) == 1\n"
SRC = {
    "src/deep/core.py": MODULE,
    "src/deep/__init__.py": "from deep.core import half, twice\n",
    "tests/test_deep.py": "from deep import half, twice\n" + SUITE,
}
SINGLE = {"alone.py": MODULE, "test_alone.py": "from alone import *\n" + SUITE}


@pytest.mark.parametrize(("files", "allowed"), [(SRC, "src/deep"), (SINGLE, "alone.py")])
def test_layouts(files: dict[str, str], allowed: str, tmp_path: Path):
    root = lay(tmp_path / "layout", files)
    settings = SETTINGS.model_copy(update={"limit": 1, "operators": ("remove",)})
    (task,) = synthesis.make([str(root)], tmp_path / "out", settings).accepted
    assert task.allowed_paths == (allowed,) and synthesis.check(task) == []


def test_what_python_brings_cannot_be_taken_away(tmp_path: Path):
    """boltons has `unquote_to_bytes` of urllib: an attempt need not write it, under whatever name."""
    stdlib = inspect.getsource(textwrap.dedent).replace("def dedent(text)", "def flush(page)")
    files = {
        "pyproject.toml": '[project]\nname = "pages"\nversion = "1"\n',
        "pages/__init__.py": "",
        "pages/text.py": f"{PATTERNS}\n\n{stdlib.replace('text', 'page')}\n\n{SIDES}\n\n{AT_THE_MARGIN}",
        "tests/test_text.py": """
            from pages.text import Ruler, flush, sides

            def test_ruler():
                assert Ruler().ruler() == ["first|first|second", "first|second|second"]

            def test_flush():
                assert flush("  a\\n  b") == "a\\nb"

            def test_sides():
                assert sides("a|b|c") == ("a", "c")
            """,
    }
    source = lay(tmp_path / "pages", files)
    settings = synthesis.SynthesisSettings(operators=("stub", "remove_module"), jobs=1)
    report = synthesis.make([str(source)], tmp_path / "tasks", settings)
    made = {task.name: task for task in report.accepted}
    assert set(made) == {"pages-stub-sides"}
    lines = (tmp_path / "tasks" / "rejections.jsonl").read_text().splitlines()
    found = {entry["task"]: (entry["reason"], entry["detail"]) for entry in map(json.loads, lines)}
    assert found["pages-stub-flush"] == found["pages-remove_module-text"]
    reason, detail = found["pages-stub-flush"]
    assert reason == "leak"
    assert re.fullmatch(
        r"flush of pages/text.py also stands in /opt/python/lib/python3\.\d+/textwrap.py", detail
    )
    children = harden.harden([made["pages-stub-sides"]], tmp_path / "children", operators=("H2",))
    assert not children.accepted
    assert "H2: leaks: flush of pages/text.py also stands in /opt/python" in " ".join(children.rejected)


def test_what_another_file_of_the_repository_has_cannot_be_taken_away(tmp_path: Path):
    """Known before any of its tests run, whether all of it goes or a detail."""
    sides = SIDES.replace("flush(page)", "page")
    files = {
        "pyproject.toml": '[project]\nname = "pages"\nversion = "1"\n',
        "pages/__init__.py": "",
        "pages/text.py": sides,
        "pages/lines.py": sides.replace("def sides", "def ends"),
        "tests/test_text.py": """
            from pages.lines import ends
            from pages.text import sides

            def test_sides():
                assert sides("a|b|c") == ends("a|b|c") == ("a", "c")
            """,
    }
    source = lay(tmp_path / "pages", files)
    settings = synthesis.SynthesisSettings(operators=("stub", "bug"), jobs=1)
    report = synthesis.make([str(source)], tmp_path / "tasks", settings)
    lines = (tmp_path / "tasks" / "rejections.jsonl").read_text().splitlines()
    found = {entry["task"]: entry["detail"] for entry in map(json.loads, lines)}
    assert any("-bug-" in name for name in found) and all("also stands" in why for why in found.values())
    assert found["pages-stub-sides"] == "sides also stands in /workspace/pages/lines.py"
    assert found["pages-stub-ends"] == "ends also stands in /workspace/pages/text.py"
    assert not report.accepted


def test_a_far_test_that_fails_is_found_in_the_folder(tmp_path: Path):
    """No line of `sides` runs in it, and it is in another file than those that run it."""
    far = """
        from pathlib import Path

        def test_the_source():
            text = Path("pages/text.py").read_text()
            assert "def sides" in text, "sides is not there"

        def test_the_name():
            assert Path("pages").is_dir()
        """
    files = {
        "pyproject.toml": '[project]\nname = "pages"\nversion = "1"\n',
        "pages/__init__.py": "",
        "pages/text.py": SIDES.replace("flush(page)", "page"),
        "tests/test_far.py": far,
        "tests/test_text.py": """
            import pages.text

            def test_sides():
                assert pages.text.sides("a|b|c") == ("a", "c")

            def test_one_column():
                assert pages.text.sides(" a ") == ("a", "a")
            """,
    }
    settings = synthesis.SynthesisSettings(operators=("remove",), jobs=1, max_lost=0.9)
    report = synthesis.make([str(lay(tmp_path / "pages", files))], tmp_path / "tasks", settings)
    (task,) = report.accepted
    assert set(task.fail_to_pass) == {
        "tests/test_far.py::test_the_source",
        *(f"tests/test_text.py::{name}" for name in ("test_sides", "test_one_column")),
    }
    assert task.pass_to_pass == ("tests/test_far.py::test_the_name",)
    assert synthesis.check(task) == []


PATTERNS = """import re

_whitespace_only_re = re.compile('^[ \\t]+$', re.MULTILINE)
_leading_whitespace_re = re.compile('(^[ \\t]*)(?:[^ \\t\\n])', re.MULTILINE)
"""
SIDES = '''def sides(page):
    """The first and the last column of a row that "|" divides."""
    columns = flush(page).strip().split("|")
    if len(columns) == 1:
        columns = [columns[0], columns[0]]
    return columns[0].strip(), columns[-1].strip()
'''
AT_THE_MARGIN = '''class Ruler:
    """Its text stands at the margin, so the method alone cannot be dedented and compiled."""

    def ruler(self):
        drawn = """first
second""".splitlines()
        return ["|".join(sorted(drawn + [word.strip()])) for word in drawn if len(word) > 2 and word != "third"]
'''
