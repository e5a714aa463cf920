"""Repositories as they come: every odd kind is made into tasks, or refused with a reason, and leaves nothing behind."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from woodshed import synthesis
from woodshed.records import TaskError
from woodshed.synthesis import baseline, builds, configuration, project, sources, suite
from woodshed.tasks import folder

CODE = "def twice(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
SUITE = "def test_twice():\n    assert twice(2) == 4\n\n\ndef test_half():\n    assert half(2) == 1\n"
IDS = {"test_twice", "test_half"}
BACKEND = """
import os, zipfile

def build_wheel(out, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(os.path.join(out, "odd-1-py3-none-any.whl"), "w") as wheel:
        for folder, _, files in os.walk("space"):
            for file in files:
                wheel.write(os.path.join(folder, file))
        wheel.writestr("odd-1.dist-info/METADATA", "Name: odd\\nVersion: 1\\n")
    return "odd-1-py3-none-any.whl"
"""
BUILD = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["tools"]\n'


def lay(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else textwrap.dedent(content).encode()
        (root / path).write_bytes(data)
    return root


def measured(tmp_path: Path, files: Mapping[str, str | bytes]) -> baseline.Baseline:
    root = lay(tmp_path / "odd", files)
    return baseline.measure(
        sources.fetch(str(root), tmp_path / "tree"), limits=suite.SuiteLimits(runs=2, timeout_s=300)
    )


KINDS: dict[str, tuple[dict[str, str | bytes], tuple[str, ...], set[str]]] = {
    "namespace package": (
        {
            "pyproject.toml": BUILD,
            "tools/backend.py": BACKEND,
            "space/odd/core.py": CODE,
            "tests/test_odd.py": "from space.odd.core import half, twice\n" + SUITE,
        },
        ("space/odd",),
        IDS,
    ),
    "namespace shared with a dependency": (
        {
            "pyproject.toml": BUILD,
            "tools/backend.py": BACKEND.replace('"space"', '"jaraco"').replace(
                "Version: 1", "Version: 1\\nRequires-Dist: jaraco.functools"
            ),
            "jaraco/odd/__init__.py": CODE,
            "tests/test_odd.py": "from jaraco.odd import half, twice\nimport jaraco.functools\n" + SUITE,
        },
        ("jaraco/odd",),
        IDS,
    ),
    "src layout": (
        {
            "src/odd/__init__.py": CODE,
            "tests/test_odd.py": "from odd import half, twice\n" + SUITE,
        },
        ("src/odd",),
        IDS,
    ),
    "flat layout, tests inside the package": (
        {
            "odd/__init__.py": CODE,
            "odd/tests/__init__.py": "",
            "odd/tests/test_odd.py": "from odd import half, twice\n" + SUITE,
        },
        ("odd",),
        IDS,
    ),
    "single module with doctests and a conftest plugin": (
        {
            "odd.py": 'def twice(x):\n    """Twice.\n\n    >>> twice(2)\n    4\n    """\n    return 2 * x\n',
            "conftest.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n\n\n"
            "def pytest_collection_modifyitems(items):\n    items.reverse()\n",
            "test_odd.py": "import doctest, odd\n\n\n"
            "def test_docs():\n    assert doctest.testmod(odd).failed == 0\n\n\n"
            "def test_two(two):\n    assert odd.twice(two) == 4\n",
        },
        ("odd.py",),
        {"test_docs", "test_two"},
    ),
    "unittest only, with subtests": (
        {
            "odd.py": CODE,
            "test_odd.py": """
                import unittest
                from odd import half, twice


                class OddTest(unittest.TestCase):
                    def test_twice(self):
                        for n in range(3):
                            with self.subTest(n=n):
                                self.assertEqual(twice(n), n + n)

                    def test_half(self):
                        self.assertEqual(half(2), 1)
                """,
        },
        ("odd.py",),
        {"OddTest::test_twice", "OddTest::test_half"},
    ),
    "xfail, xpass, skip and ids with spaces and unicode": (
        {
            "odd.py": CODE,
            "test_odd.py": """
                import pytest
                from odd import twice


                @pytest.mark.parametrize("x", [pytest.param(1, id="a b::[c]"), pytest.param(2, id="grün")])
                def test_ids(x):
                    assert twice(x) == x + x


                @pytest.mark.xfail
                def test_expected():
                    assert twice(1) == 3


                @pytest.mark.xfail
                def test_unexpected():
                    assert twice(1) == 2


                def test_skipped():
                    pytest.skip("not here")
                """,
        },
        ("odd.py",),
        {"test_ids[a b::[c]]", "test_ids[gr\\xfcn]"},
    ),
    "flaky tests and tests that need the network": (
        {
            "odd.py": CODE,
            "test_odd.py": "import os, socket\nfrom odd import half, twice\n"
            + SUITE
            + "\n\ndef test_flaky():\n    assert os.environ['PYTHONHASHSEED'] != '1'\n"
            + "\n\ndef test_network():\n    socket.create_connection(('example.org', 80), 5)\n",
        },
        ("odd.py",),
        IDS,
    ),
    "symlinks, files that are not UTF-8, syntax that this Python does not know": (
        {
            "odd/__init__.py": CODE,
            "odd/old.py": "print 'two'\n",
            "odd/latin.py": "# -*- coding: latin-1 -*-\nname = 'Grün'\n".encode("latin-1"),
            "tests/test_odd.py": "from odd import half, twice\nfrom odd.latin import name\n" + SUITE,
            "tests/test_old.py": "print 'two'\n",
        },
        ("odd",),
        IDS,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_can_be_used(kind: str, tmp_path: Path):
    files, paths, expected = KINDS[kind]
    if kind.startswith("symlinks"):
        lay(tmp_path / "odd", {"odd/data.txt": "x"})
        (tmp_path / "odd/odd/inside.txt").symlink_to("data.txt")
        (tmp_path / "odd/odd/outside.txt").symlink_to("/etc/hostname")
    found = measured(tmp_path, files)
    assert found.allowed_paths == paths
    assert {test.partition("::")[2] for test in found.stable} == expected
    if kind.startswith("symlinks"):
        assert found.uncollected == ("tests/test_old.py",) and "odd.old" not in found.modules
        assert (found.repository.tree / "odd/inside.txt").is_symlink()
        assert not (found.repository.tree / "odd/outside.txt").is_symlink()


REFUSED: dict[str, tuple[dict[str, str | bytes], str]] = {
    "all tests need the network": (
        {
            "odd.py": CODE,
            "test_odd.py": "import odd, socket\ndef test_x():\n    socket.create_connection(('example.org', 80), 5)\n",
        },
        "odd: its tests do not run here",
    ),
    "no tests": ({"odd.py": CODE}, "odd has no tests that pytest finds"),
    "modules that do not lie where they are imported from": (
        {
            "pyproject.toml": BUILD,
            "tools/backend.py": BACKEND.replace(
                "os.path.join(folder, file))", "os.path.join(folder, file), 'odd.two/' + file)"
            ),
            "space/core.py": CODE,
        },
        r"no package of its wheel was found in the repository: its build makes odd\.two/core\.py of space/core\.py\. .*"
        "folders must be named as the packages are",
    ),
    "nothing that can be imported": ({"odd.txt": "x"}, "no package of its wheel was found"),
    "only syntax that this Python does not know": (
        {"odd.py": "print 'two'\n", "test_odd.py": "import odd\ndef test_x(): pass\n"},
        "SyntaxError",
    ),
}


def test_folders_and_dead_links_named_as_sources_are_left_out_with_the_reason(tmp_path: Path):
    """Whole repositories were lost for one of them, with or without a build description."""
    root = lay(
        tmp_path / "odd",
        {"odd/__init__.py": CODE, "data.py/x.txt": "x", "odd/inner.py/deep.py/y.py": "y = 1\n"},
    )
    (root / "odd/link.py").symlink_to("gone.py")
    (root / "odd/stub.pyi").symlink_to("gone.pyi")
    (root / "odd/same.py").symlink_to("__init__.py")
    found = sources.fetch(str(root), tmp_path / "tree")
    assert found.left_out == {
        "data.py": "it is a folder, and is left out",
        "odd/inner.py": "it is a folder, and is left out",
        "odd/link.py": "it is a link to 'gone.py', which is no file, and is left out",
        "odd/stub.pyi": "it is a link to 'gone.pyi', which is no file, and is left out",
    }
    assert sorted(path.name for path in found.tree.rglob("*.py")) == ["__init__.py", "same.py"]
    wheel = builds.contents_of("odd", builds.as_it_is(found))
    assert {"odd/__init__.py", "odd/same.py"} <= wheel.keys()


def test_settings_that_pytest_refuses_are_named_with_their_file(tmp_path: Path):
    for text in ("[tool.pytest]\nini_options = 4\n", "[tool]\npytest = 4\n", "tool = 4\n"):
        lay(tmp_path, {"pyproject.toml": text})
        with pytest.raises(TaskError, match=r"pyproject.toml: pytest refuses \w+ = 4; make that a table"):
            configuration.refuse_what_pytest_refuses(tmp_path)
    (tmp_path / "pytest.ini").touch()
    configuration.refuse_what_pytest_refuses(tmp_path)


@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_that_are_refused(kind: str, tmp_path: Path):
    files, message = REFUSED[kind]
    out = tmp_path / "out"
    with pytest.raises(TaskError, match=f"(?s){message}"):
        synthesis.make([str(lay(tmp_path / "odd", files))], out, synthesis.SynthesisSettings(timeout_s=300))
    assert not out.exists()  # nothing half-written


def test_a_build_that_does_not_end_is_stopped_and_says_so(tmp_path: Path):
    loop = "import time\nprint('asking', flush=True)\nwhile True:\n    time.sleep(1)\n"
    root = lay(tmp_path / "odd", {"pyproject.toml": BUILD, "tools/backend.py": loop, "odd.py": CODE})
    repository = sources.fetch(str(root), tmp_path / "tree")
    with pytest.raises(TaskError, match=r"(?s)took longer than 3 s.*asking.*without pyproject\.toml"):
        project.read(repository, timeout_s=3)
    said: list[str] = []
    with pytest.raises(TaskError):
        baseline.measure(
            sources.fetch(str(lay(tmp_path / "none", {"x.txt": ""})), tmp_path / "tree"),
            progress=lambda done, total, text: said.append(text),
        )
    assert said == ["building none, at most 300 s"]


def test_a_clone_that_fails_says_what_git_complained_about(tmp_path: Path):
    with pytest.raises(
        TaskError, match=r"cannot be cloned: fatal: '/none/x' does not appear to be a git repository$"
    ):
        sources.fetch("git+file:///none/x", tmp_path / "tree")


def test_an_odd_repository_becomes_proven_tasks(tmp_path: Path):
    files = KINDS["symlinks, files that are not UTF-8, syntax that this Python does not know"][0]
    root = lay(tmp_path / "odd", {**files, "odd/data.txt": "x"})
    (root / "odd/inside.txt").symlink_to("data.txt")
    settings = synthesis.SynthesisSettings(limit=1, timeout_s=300, operators=("remove",))
    (task,) = synthesis.make([str(root)], tmp_path / "out", settings).accepted
    assert synthesis.check(folder.load(task.folder)) == []
    workspace = task.folder / "environment/workspace"
    assert not (workspace / "tests/test_old.py").exists()  # what cannot be collected is not shown
    assert (workspace / "odd/latin.py").read_bytes() == files["odd/latin.py"]
