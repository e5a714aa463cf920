"""Sources as people have them: other encodings, line ends and file names, from the folder to the proven task."""

from __future__ import annotations

import ast
import io
import json
import os
import py_compile
import shutil
import subprocess
import textwrap
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from woodshed import grading, synthesis
from woodshed.cli import app
from woodshed.grading.patches import added_lines
from woodshed.pysource import syntax
from woodshed.records import Patch, Task
from woodshed.sandbox import BUBBLEWRAP
from woodshed.synthesis import leaks, sources
from woodshed.synthesis.leaks import readers
from woodshed.synthesis.leaks.shown import shown_tests
from woodshed.synthesis.names import Codebase
from woodshed.synthesis.operators import OPERATORS, symbols
from woodshed.tasks import export, folder

# ---- other line ends and encodings ------------------------------------------------------------------------

LEDGER = '''\
# Sums: small ones.
"""Adding up."""
import functools

ORDER = ("total", "largest")


def total(rows):
    """The sum of the amounts."""
    result = 0
    for _, amount in rows:
        result += amount  # ümlaut
    return result


# the largest
def largest(rows, first=True):
    """The name with the largest amount.

    Args:
        first: of equal ones.
    """
    best, found = None, None
    for name, amount in rows:
        if best is None or amount > best:
            best, found = amount, name
        elif amount == best and not first:
            found = name
    return found
'''
WRITTEN = {
    "a mark": lambda text: "\ufeff" + text,
    "Windows": lambda text: text.replace("\n", "\r\n"),
    "a mark, Windows": lambda text: "\ufeff" + text.replace("\n", "\r\n"),
    "old Macintosh": lambda text: text.replace("\n", "\r"),
    "a coding line": lambda text: text.replace("# Sums", "# coding=latin-1 Sums"),
    "a return in a comment": lambda text: text.replace("Sums: ", "Sums:\r# "),
    "a form feed": lambda text: text.replace("# the largest", "\x0c# the largest"),
    "separators that are none": lambda text: text.replace("ümlaut", "ü\u2028\x85\x1c\x0b"),
}


@pytest.mark.parametrize("way", WRITTEN)
@pytest.mark.parametrize(
    "operator", ["stub", "stub_bare", "remove", "remove_parameter", "remove_branch", "bug"]
)
def test_an_edit_is_the_same_however_lines_end_and_text_is_written(way, operator):
    write = WRITTEN[way]
    plain, other = (Codebase({"ledger.py": text}, (".",)) for text in (LEDGER, write(LEDGER)))
    parts = {"remove_parameter": "first", "remove_branch": "0", "bug": "0"}
    (_, one), (_, two) = ([*symbols(code)] for code in (plain, other))
    one, two = (replace(symbol, detail=parts.get(operator, "")) for symbol in (one, two))
    expected = OPERATORS[operator](plain, one, 4).changed["ledger.py"]
    changed = OPERATORS[operator](other, two, 4).changed["ledger.py"]
    assert expected not in (None, LEDGER) and changed is not None
    assert changed == write(expected)
    assert (two.header, two.docstring, two.body_lines) == (one.header, one.docstring, one.body_lines)
    assert syntax.decode(syntax.encode(changed)) == changed


def test_lines_that_were_converted_twice_are_edited_all_the_same():
    text = LEDGER.replace("\n", "\r\r\n")
    code = Codebase({"ledger.py": text}, (".",))
    for symbol in symbols(code):
        for operator in ("stub", "remove"):
            changed = OPERATORS[operator](code, symbol, 4).changed["ledger.py"]
            assert changed is not None and ast.parse(changed)
            assert set(syntax.LINE_END.findall(changed)) == {"\r", "\r\n"}


# ---- file names -------------------------------------------------------------------------------------------

NAMES = (
    "docs/Screenshot 2024-05-01 at 9.41.07\u202fAM.png",
    "docs/no\u00a0break.txt",
    "docs/two\nlines.txt",
    'docs/it\'s "quoted" $(x) `y`.txt',
    "-leading.txt",
    "docs/tab\there.txt",
    "docs/\U0001f469\u200d\U0001f4bb.md",
    "tests/data/wide\u3000space\nand line.txt",
)


def git(repository: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=repository, check=True, capture_output=True)


def files(root: Path) -> dict[str, bytes]:
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and ".git" not in p.relative_to(root).parts
    }


def test_a_file_may_be_called_anything_in_folders_and_in_git_alike(tmp_path: Path):
    root = tmp_path / "repo"
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    strange = os.fsdecode(b"docs/caf\xe9.txt")
    (root / strange).write_bytes(b"coffee")
    plain = sources.fetch(str(root), tmp_path / "plain")
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "one")
    tracked = sources.fetch(str(root), tmp_path / "tracked")
    cloned = sources.fetch(f"git+file://{root}@HEAD", tmp_path / "cloned")
    for found in (plain, tracked, cloned):
        assert files(found.tree) == {name: name.encode() for name in NAMES}
        assert found.left_out == {"docs/caf\\xe9.txt": "its name is not UTF-8, so it is left out"}
    assert plain.sha256 == tracked.sha256 == cloned.sha256


def test_a_patch_may_name_spaces_but_no_line_ends_and_nothing_outside():
    assert all(map(folder.is_inside, NAMES))
    assert [folder.is_clean(name) for name in NAMES] == [True, True, False, True, True, False, False, False]
    for bad in ("../a", "/a", "a/../b", "a//b", ".", "", "a\0b", os.fsdecode(b"\xff"), "x" * 256):
        assert not folder.is_inside(bad)


# ---- exports ----------------------------------------------------------------------------------------------

ATTRIBUTES = """\
* text=auto
*.txt text eol=crlf
*.md ident
*.enc working-tree-encoding=UTF-16
*.lfs filter=lfs diff=lfs merge=lfs -text
docs export-ignore
version.py export-subst
"""


def test_a_checkout_of_an_exported_commit_is_the_workspace(tiny_task: Task, tmp_path: Path):
    odd = {
        ".gitattributes": ATTRIBUTES.encode(),
        "windows.rst": b"a\r\nb\r\n",
        "unix.txt": b"a\nb\n",
        "mixed.txt": b"a\r\nb\n\r",
        "ident.md": b"$Id$ and $Id: 12 $\n",
        "utf-8.enc": "é\n".encode(),
        "large.lfs": b"version https://git-lfs.github.com/spec/v1\n",
        "docs/.gitattributes": b"* text eol=crlf\n",
        "docs/a.md": b"# $Format:%H$\n",
        "version.py": b"V = '$Format:%H$'\n",
        ".gitignore": b"*.rst\n",
    }
    workspace = tmp_path / "workspace"
    shutil.copytree(tiny_task.folder / "environment" / "workspace", workspace)
    for path, data in odd.items():
        (workspace / path).parent.mkdir(exist_ok=True)
        (workspace / path).write_bytes(data)
    gold = {p: None if t is None else t.encode() for p, t in folder.gold_patch(tiny_task).files.items()}
    tests = folder.protected_files(tiny_task)
    task = folder.write(tiny_task, tmp_path / "odd", workspace=workspace, tests=tests, gold=gold)
    commit = export.repository(task, tmp_path / "made")
    assert commit == export.instance(task, "swebench")["base_commit"]
    for file in (tmp_path / "made").iterdir():
        if file.name != ".git":
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    git(tmp_path / "made", "checkout", "--quiet", "--force", commit)
    assert files(tmp_path / "made") == files(task.folder / "environment" / "workspace")
    patch = tmp_path / "gold.patch"
    patch.write_text(export.instance(task, "swebench")["patch"])
    git(tmp_path / "made", "apply", str(patch))
    assert files(tmp_path / "made") == files(workspace) | gold


# ---- from the folder to the task --------------------------------------------------------------------------

TWICE = '''\
def {name}(x):
    """Twice a number or text."""
    out = x
    out = out + x
    return out
'''
TEST = """\
from {module} import {name}


def test_{name}():
    assert {name}(2) == 4
    assert {name}("é") == "éé"
    assert {name}(-3) == -6
"""


def twice(name: str, mark: str = "", end: str = "\n", codec: str = "utf-8") -> bytes:
    return (mark + TWICE.format(name=name)).replace("\n", end).encode(codec)


def checks(name: str, mark: str = "", end: str = "\n", codec: str = "utf-8") -> bytes:
    text = mark + TEST.format(module=f"odd.{name}", name=name)
    return text.replace("\n", end).encode(codec)


LATIN = "# -*- coding: latin-1 -*-\n# é\n"
ODD = {
    "odd/__init__.py": b"",
    "odd/marked.py": twice("marked", mark="\ufeff"),
    "odd/latin.py": twice("latin", mark=LATIN, codec="latin-1"),
    "odd/returns.py": twice("returns", end="\r\r\n"),
    "odd/generated.py": twice("generated"),
    "odd/lost.py": b"x = '\xe9'\n",
    "odd/old.py": b"print 'x'\n",
    "odd/strange.py": twice("strange").replace(b"out = x\n", b"out = x  # \xe9\n"),
    "tests/test_marked.py": checks("marked", mark="\ufeff"),
    "tests/more tests/test_latin.py": checks("latin", mark=LATIN, end="\r\n", codec="latin-1"),
    "-q/test_returns.py": checks("returns", end="\r"),
    "tests/@it's\u202f$(x)/test_generated.py": (
        checks("generated").replace(b"def test_generated", b"def check")
        + b"\n\nglobals()['test_generated'] = check\ndel check\n"
    ),
    "tests/test_strange.py": checks("strange"),
    "tests/a[1]/test_bracket.py": checks("marked"),
    "tests/test_still.py": b"def test_still():\n    assert True\n",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, synthesis.MakeReport]:
    root, out = tmp_path_factory.mktemp("sources") / "odd", tmp_path_factory.mktemp("made") / "odd"
    for path, data in ODD.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    settings = synthesis.SynthesisSettings(jobs=2, timeout_s=300, operators=("stub",))
    return out, synthesis.make([str(root)], out, settings)


def test_odd_sources_become_tasks_that_hide_their_tests(made: tuple[Path, synthesis.MakeReport]):
    _, report = made
    names = ("generated", "latin", "marked", "returns")
    assert sorted(task.name for task in report.accepted) == [f"odd-stub-{name}" for name in names]
    for task, name in zip(sorted(report.accepted, key=lambda task: task.name), names, strict=True):
        shown = files(task.folder / "environment" / "workspace")
        changed = {path for path, data in ODD.items() if shown.get(path) != data}
        test_file = task.fail_to_pass[0].partition("::")[0]
        assert changed == {f"odd/{name}.py", test_file, "tests/a[1]/test_bracket.py"}
        assert b"NotImplementedError" in shown[f"odd/{name}.py"]
        gold = folder.gold_patch(task).files[f"odd/{name}.py"]
        assert gold is not None and syntax.encode(gold) == ODD[f"odd/{name}.py"]
    assert not any(found.leaks for found in leaks.scan(report.accepted, shared=()))
    assert [
        synthesis.check(task) for task in report.accepted if task.name.endswith(("generated", "latin"))
    ] == [[], []]


def test_files_that_cannot_be_read_are_named(made: tuple[Path, synthesis.MakeReport]):
    out, report = made
    assert report.files.keys() == {"odd/lost.py", "odd/old.py", "tests/a[1]/test_bracket.py"}
    assert report.files["tests/a[1]/test_bracket.py"].startswith(
        "pytest cannot be asked to run a file of this name"
    )
    assert report.files["odd/lost.py"].startswith("not UTF-8: byte 0xe9 at 5; Python needs a coding line")
    assert report.files["odd/old.py"].startswith("line 1: Missing parentheses")
    assert report.rejected == {"not_text": 1}
    said = CliRunner().invoke(app, ["tasks", "stats", str(out)]).stdout
    assert "skipped: odd/lost.py: not UTF-8" in said and "skipped: odd/old.py: line 1" in said


def changed(
    task: Task,
    folder_: Path,
    planted: dict[str, bytes],
    tests: dict[str, bytes] | None = None,
    **changes: Any,
) -> Task:
    """The task with more files in its workspace, and perhaps other hidden tests."""
    workspace = folder_.with_name("workspace")
    shutil.copytree(task.folder / "environment" / "workspace", workspace)
    for path, data in planted.items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_bytes(data)
    gold = {"odd/marked.py": (task.folder / "solution" / "files" / "odd/marked.py").read_bytes()}
    tests = folder.protected_files(task) if tests is None else tests
    return folder.write(replace(task, **changes), folder_, workspace=workspace, tests=tests, gold=gold)


def compiled(source: bytes, folder_: Path) -> bytes:
    (folder_ / "source.py").write_bytes(source)
    py_compile.compile(str(folder_ / "source.py"), str(folder_ / "pyc"), doraise=True)
    return (folder_ / "pyc").read_bytes()


def zipped(source: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tests/test_marked.py", source)
    return file.getvalue()


def test_a_hidden_test_is_found_in_whatever_form_it_can_be_read(
    made: tuple[Path, synthesis.MakeReport], tmp_path: Path
):
    task = next(task for task in made[1].accepted if task.name == "odd-stub-marked")
    text = ODD["tests/test_marked.py"].decode("utf-8-sig")
    plain = text.encode()
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": text.splitlines(keepends=True)}
    blob = b"blob %d\0" % len(plain) + plain
    forms = {
        "tests/test_marked.py": text.encode("utf-8-sig"),
        "tests/wide.txt": text.encode("utf-16"),
        "examples/latin.py": f"# coding: latin-1\n{text}".encode("latin-1"),
        "examples/windows.py": f"# coding: cp1252\n# \u20ac\n{text}".encode("cp1252"),
        "tests/test_old.pyc": compiled(plain, tmp_path),
        "docs/testing.rst": f"Testing::\n\n{textwrap.indent(text, '    ')}".encode(),
        "docs/tour.ipynb": json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4}).encode(),
        "odd.egg-info/tests.py": plain,
        "dist/odd-1.0.whl": zipped(plain),
        "old.git/objects/ab/cdef": zlib.compress(blob),
    }
    shown = changed(task, tmp_path / "shown", forms)
    (found,) = leaks.scan([shown], shared=())
    tests = [leak for leak in found.leaks if leak.kind == "test"]
    assert {leak.what for leak in tests} == {"tests/test_marked.py::test_marked"}
    places = {leak.where.removeprefix("/workspace/").partition(" > ")[0] for leak in tests}
    assert places == set(forms)
    assert "hidden tests can be read in the workspace" in "; ".join(synthesis.check(shown))
    assert leaks.first_leak(shown).startswith("test of tests/test_marked.py::test_marked in /workspace")


COLLECTS = b"""
import pytest

class Check(pytest.Item):
    def runtest(self):
        from odd.marked import marked
        argument, value = self.path.read_text().split()
        assert str(marked(int(argument))) == value

class Checks(pytest.File):
    def collect(self):
        yield Check.from_parent(self, name="check")

def pytest_collect_file(file_path, parent):
    if file_path.suffix == ".check":
        return Checks.from_parent(parent, path=file_path)
"""
METHOD = b"""
from odd.marked import marked

class Rules:
    def test_marked(self):
        assert marked(2) == 4
        assert marked("e") == "ee"
"""
CHILD = b"from rules import Rules\n\nclass TestMarked(Rules):\n    pass\n"
KINDS = {
    "inherited": (
        "tests/test_child.py::TestMarked::test_marked",
        {"tests/test_child.py": CHILD, "tests/rules.py": METHOD},
        {"tests/rules.py": METHOD},
        "tests/rules.py",
    ),
    "renamed": (
        "tests/test_marked.py::test_marked",
        {"tests/test_marked.py": checks("marked")},
        {"tests/check_it.py": checks("marked"), "setup.cfg": b"[tool:pytest]\npython_files = check_*.py\n"},
        "tests/check_it.py",
    ),
    "a text that a conftest collects": (
        "tests/four.check::check",
        {"tests/conftest.py": COLLECTS, "tests/four.check": b"2 4\n"},
        {"tests/conftest.py": COLLECTS, "tests/four.check": b"2 4\n"},
        "tests/four.check",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hidden_test_is_known_by_what_is_collected(
    kind: str, made: tuple[Path, synthesis.MakeReport], tmp_path: Path
):
    task = next(task for task in made[1].accepted if task.name == "odd-stub-marked")
    test, tests, planted, where = KINDS[kind]
    shown = changed(task, tmp_path / "shown", planted, tests, fail_to_pass=(test,), decoys=())
    found = shown_tests(shown, BUBBLEWRAP)
    assert {each.where for each in found} == {f"/workspace/{where}"}
    gone = changed(task, tmp_path / "more" / "gone", {}, tests, fail_to_pass=(test,), decoys=())
    assert shown_tests(gone, BUBBLEWRAP) == []


@pytest.mark.parametrize("codec", ["utf-8-sig", "latin-1", "cp1251", "utf-7", "raw_unicode_escape", "utf-16"])
def test_a_leak_scan_reads_every_encoding_that_python_reads(codec: str):
    coding = "" if codec in ("utf-8-sig", "utf-16") else f"# coding: {codec}\n"
    secret = "def f():\n    return 'ж' * 3\n" if codec != "latin-1" else "def f():\n    return 'é' * 3\n"
    pieces = list(readers.read("a.py", (coding + secret).encode(codec)))
    assert any(piece.text == coding + secret for piece in pieces)


def test_a_patch_crosses_in_the_encoding_that_its_file_declares(made: tuple[Path, synthesis.MakeReport]):
    task = next(task for task in made[1].accepted if task.name == "odd-stub-latin")
    assert grading.crossing(task, folder.gold_patch(task)) == ({"odd/latin.py": ODD["odd/latin.py"]}, {})
    lost: dict[str, str | None] = {
        "odd/latin.py": "# coding: nope\n",
        "odd/marked.py": "# coding: latin-1\nx = '\u0416'\n",
    }
    reason = "no text in the encoding that it declares"
    assert grading.crossing(task, Patch(lost)) == ({}, dict.fromkeys(lost, reason))


def test_lines_that_a_patch_brings_are_counted_as_python_counts(made: tuple[Path, synthesis.MakeReport]):
    task = next(task for task in made[1].accepted if task.name == "odd-stub-returns")
    data = b"# hidden\rimport sys\r\rdef returns(x):\r\n    sys.exit()\n\x0c# more\n"
    lines = [line.lineno for line in ast.walk(ast.parse(data)) if isinstance(line, ast.stmt)]
    assert lines == [2, 4, 5]
    assert added_lines(task, "odd/returns.py", data) == [1, 2, 5, 6]
