"""Task making: real little repositories, edited, run and proven in real sandboxes."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import re
import shutil
import subprocess
import tarfile
import textwrap
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from woodshed import synthesis
from woodshed.records import TaskError
from woodshed.synthesis import baseline, instructions, operators, project, pruning, sources, stats, suite
from woodshed.synthesis.names import Codebase
from woodshed.synthesis.operators import CascadeError, Deletion


def lay(root: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(textwrap.dedent(text).lstrip("\n").encode())
    return root


def codebase(**files: str) -> Codebase:
    """A package `pkg` with these modules."""
    return Codebase(
        {f"pkg/{name}.py": textwrap.dedent(text).lstrip("\n") for name, text in files.items()}, ["."]
    )


def symbol(code: Codebase, name: str) -> operators.Symbol:
    return next(s for s in operators.symbols(code) if s.name == name)


def removal(code: Codebase, name: str, max_cascade: int = 4) -> Deletion:
    return operators.remove(code, symbol(code, name), max_cascade)


# ---- operators and closure --------------------------------------------------------------------------------

SHAPES = '''
"""Shapes."""  # keep

from functools import partial


def area(w, h):  # both in metres
    """Area of a rectangle.

    More words.
    """
    # multiply
    return w * h
    # done


def square(w): return area(w, w)


def cube(w):
    return w ** 3


class Box:
    size = 1

    def volume(self):
        return self.size ** 3

    content = volume


__all__ = ["area", "square",  # first
           "cube", "Box"]
FORMULAS = {
    "area": area,  # the first
    "cube": partial(cube, 2),

    # a comment of its own
    "both": [area, cube],
}
PAIRS = [("a", area), ("c", cube)]
ONLY = (area, cube)
default = area
print_area = partial(area, 1)
'''


def test_stub_keeps_signature_and_docstring_and_every_other_byte():
    code = codebase(shapes=SHAPES)
    before = code.texts["pkg/shapes.py"]
    deletion = operators.stub(code, symbol(code, "area"))
    body = before[before.index("    # multiply") : before.index("\n\ndef square")]
    expected = before.replace(body, '    raise NotImplementedError("area")\n')
    assert deletion.changed == {"pkg/shapes.py": expected}
    line = expected.split("\n")[deletion.gap[0] - 1]
    assert line == '    raise NotImplementedError("area")' and deletion.gap == (11, 11)
    assert deletion.symbol.header == "def area(w, h):  # both in metres"
    assert deletion.symbol.body_lines == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x): return x\n", 'def f(x): raise NotImplementedError("f")\n'),
        ("def f(x):\r\n    return x\r\n", 'def f(x):\r\n    raise NotImplementedError("f")\r\n'),
        (
            'def f(x={"a:b": 1}):\n    # é\n    return x',
            'def f(x={"a:b": 1}):\n    raise NotImplementedError("f")\n',
        ),
        (
            "@d\nasync def f(\n    x,\n):\n    y = x\n    return y\nz = 1\n",
            '@d\nasync def f(\n    x,\n):\n    raise NotImplementedError("f")\nz = 1\n',
        ),
        (
            "class A:\n    def f(self):\n        'Doc.'; return 1\n",
            "class A:\n    def f(self):\n        'Doc.'; raise NotImplementedError(\"A.f\")\n",
        ),
    ],
)
def test_stub_of_unusual_bodies(text: str, expected: str):
    code = Codebase({"m.py": text}, ["."])
    assert operators.stub(code, next(operators.symbols(code))).changed == {"m.py": expected}


def test_removal_takes_elements_out_of_literals_and_leaves_the_rest():
    code = codebase(shapes=SHAPES)
    before = code.texts["pkg/shapes.py"]
    deletion = removal(code, "area")
    expected = before[: before.index("def area")] + before[before.index("def square") :]
    expected = expected.replace('["area", "square"', '["square"').replace(
        '    "area": area,  # the first\n', ""
    )
    expected = expected.replace("[area, cube]", "[cube]").replace('("a", area), ', "")
    expected = expected.replace("(area, cube)", "(cube,)")
    expected = expected.replace("default = area\nprint_area = partial(area, 1)\n", "")
    assert deletion.changed == {"pkg/shapes.py": expected}
    assert deletion.removed == {("pkg/shapes.py", n) for n in ("area", "default", "print_area")}
    assert expected.split("\n")[deletion.gap[0] - 1] == "def square(w): return area(w, w)"
    assert {t.place for t in deletion.traces} == {"__all__", "FORMULAS", "PAIRS", "ONLY", "statement"}


def test_removal_of_a_method_follows_aliases_in_the_class():
    code = codebase(shapes=SHAPES, use="from .shapes import Box\n\nmeasure = Box.volume\n")
    deletion = removal(code, "Box.volume")
    text = deletion.changed["pkg/shapes.py"] or ""
    assert text.count("volume") == text.count("content") == 0 and "class Box:\n    size = 1\n" in text
    assert deletion.changed["pkg/use.py"] == "from .shapes import Box\n\n"


def test_removal_follows_imports_through_the_package():
    code = codebase(
        __init__="from .core import *\nfrom . import core, curried\ncomp = core.compose\n",
        core="""
            __all__ = ('compose', 'pipe')
            def compose(f):
                return f
            def pipe(f):
                return compose(f)
            """,
        curried="""
            import pkg
            from pkg import (
                compose as c,
                pipe,
            )
            fast = pkg.compose(pkg.pipe)
            slow = c
            """,
        lazy="def late():\n    from .core import compose\n    return compose\n",
        fallback="try:\n    from .core import compose\nexcept ImportError:\n    compose = None\n",
    )
    changed = removal(code, "compose").changed
    assert changed["pkg/__init__.py"] == "from .core import *\nfrom . import core, curried\n"
    assert changed["pkg/core.py"] == "__all__ = ('pipe',)\ndef pipe(f):\n    return compose(f)\n"
    assert changed["pkg/curried.py"] == "import pkg\nfrom pkg import (\n    pipe,\n)\n"
    assert "pkg/lazy.py" not in changed  # a call in a function fails honestly when it runs
    assert changed["pkg/fallback.py"] == "try:\n    pass\nexcept ImportError:\n    pass\n"


def test_removal_takes_what_is_decorated_or_derived_and_stops_at_a_cascade():
    code = codebase(
        deco="""
            def mark(f):
                return f


            @mark
            def one():
                return 1


            def two(f=mark):
                return f


            @mark
            class C:
                x = 1


            class D(C):
                pass
            """
    )
    with pytest.raises(CascadeError, match="4 more definitions depend on it: one, two, C, D"):
        removal(code, "mark", max_cascade=3)
    assert removal(code, "mark").changed == {"pkg/deco.py": ""}


def test_symbols_are_public_defined_once_and_do_something():
    code = codebase(
        m="""
        import typing
        def _private(): return 1
        def empty(): ...
        def todo():
            raise NotImplementedError
        @typing.overload
        def over(x: int) -> int: ...
        def over(x): return x
        def twice(): return 1
        def twice(): return 2
        class _Hidden:
            def method(self): return 1
        class Open:
            @property
            def size(self): return 1
            @size.setter
            def size(self, x): self.y = x
            def __len__(self): return 2
        """
    )
    assert [s.name for s in operators.symbols(code)] == ["over", "Open.size"]
    assert "over" not in (removal(code, "over").changed["pkg/m.py"] or "over")
    assert "size" not in (removal(code, "Open.size").changed["pkg/m.py"] or "size")


def test_type_stubs_lose_the_name_too():
    code = codebase(core="def one():\n    return 1\ndef two():\n    return 2\n")
    stubs = Codebase({"pkg/core.pyi": "def one() -> int: ...\ndef two() -> int: ...\n"}, ["."])
    deletion = operators.remove_interfaces(stubs, removal(code, "one"))
    assert deletion.changed["pkg/core.pyi"] == "def two() -> int: ...\n"


TESTS = {
    "tests/__init__.py": """
        class Mixin:
            def test_shared(self):
                assert self.make() == 2

            def test_plain(self):
                pass
        """,
    "tests/conftest.py": """
        import pytest
        from pkg.core import one


        @pytest.fixture
        def first():
            return one()


        @pytest.fixture
        def second():
            return 2
        """,
    "tests/test_core.py": """
        from pkg.core import one, two
        import pkg.core
        from . import Mixin


        def helper():
            return one()


        # about one
        def test_helper():
            assert helper() == 1


        def test_fixture(first):
            assert first


        def test_two():  # stays
            assert two() == 2


        def test_failing():
            assert pkg.core.two() == 3


        class TestTwo(Mixin):
            def make(self):
                return two()

            def test_one(self):
                assert pkg.core.one()
        """,
}
VISIBLE = {
    "tests/__init__.py": """
        class Mixin:
            def test_plain(self):
                pass
        """,
    "tests/conftest.py": """
        import pytest


        @pytest.fixture
        def second():
            return 2
        """,
    "tests/test_core.py": """
        from pkg.core import two
        import pkg.core
        from . import Mixin


        def test_two():  # stays
            assert two() == 2


        class TestTwo(Mixin):
            def make(self):
                return two()
        """,
}


def test_pruning_takes_tests_helpers_and_fixtures_that_need_what_is_gone():
    code = codebase(__init__="", core="def one():\n    return 1\ndef two():\n    return 2\n")
    tests, expected = ({p: textwrap.dedent(t).lstrip() for p, t in f.items()} for f in (TESTS, VISIBLE))
    failing = ["tests/test_core.py::test_failing", "tests/test_core.py::TestTwo::test_shared"]
    assert pruning.prune(removal(code, "one"), tests, failing) == expected


def test_instructions_name_what_is_needed_and_fit():
    code = codebase(shapes=SHAPES)
    text = instructions.write(removal(code, "area"), "python -m pytest -q tests")
    assert "`area` to pkg/shapes.py, before line 6" in text and "def area(w, h):" in text
    assert "Area of a rectangle." in text and "More words" not in text
    assert '`"area"` in `__all__` of pkg/shapes.py' in text and "`default = area`" in text
    cut = instructions.write(operators.stub(code, symbol(code, "area")), "pytest", max_words=28)
    assert "Area of a ..." not in cut and len(cut.split()) <= 28
    with pytest.raises(instructions.TooLongError):
        instructions.write(removal(code, "area"), "pytest", max_words=20)


# ---- sources ----------------------------------------------------------------------------------------------


def git(repository: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(
        ["git", *who, "-C", str(repository), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_folder_is_copied_without_leftovers(tmp_path: Path):
    root = lay(
        tmp_path / "Some_Pkg",
        {
            "pkg/__init__.py": "",
            "pkg/tags/data.txt": "kept",
            "pkg/__pycache__/a.pyc": "x",
            ".mypy_cache/3.11/cache.db": "x",
            "build/lib/pkg/__init__.py": "x",
            "pkg/build/kept.py": "",
            "some.egg-info/SOURCES.txt": "x",
            "notes.py~": "x",
            "LICENSE": "MIT License\n\nPermission is hereby granted, free\nof charge, to any person",
        },
    )
    (root / "outside").symlink_to("/etc")
    (root / "inside").symlink_to("pkg")
    for place, mode in [("pkg/tags/data.txt", 0o444), ("pkg/tags", 0o555), (".mypy_cache/3.11", 0o555)]:
        (root / place).chmod(mode)
    repository = sources.fetch(str(root), tmp_path / "copy")
    for place in (root / "pkg/tags", root / ".mypy_cache/3.11"):
        place.chmod(0o755)  # so that the test's own folder can be removed
    assert (repository.tree / "pkg/tags/data.txt").stat().st_mode & 0o777 == 0o644
    assert (repository.tree / "pkg/tags").stat().st_mode & 0o700 == 0o700
    found = {p.relative_to(repository.tree).as_posix() for p in repository.tree.rglob("*") if not p.is_dir()}
    assert found == {"LICENSE", "pkg/__init__.py", "pkg/tags/data.txt", "pkg/build/kept.py"}
    assert (repository.name, repository.version, repository.licence) == ("some-pkg", "0.0.0", "MIT")
    assert sources.fetch(str(root), tmp_path / "again").sha256 == repository.sha256


def test_git_sources(tmp_path: Path):
    root = lay(tmp_path / "pkg.git", {"a.py": "x = 1\n"})
    git(root, "init", "-q")
    git(root, "add", "a.py")
    git(root, "commit", "-qm", "one")
    git(root, "tag", "v1.2.0")
    lay(root, {"a.py": "x = 2\n", "untracked.py": ""})
    git(root, "commit", "-qam", "two")
    repository = sources.fetch(f"git+file://{root}@v1.2.0", tmp_path / "copy")
    assert (repository.name, repository.version) == ("pkg", "1.2.0")
    assert repository.source.endswith("@" + git(root, "rev-parse", "v1.2.0"))
    assert [p.name for p in repository.tree.iterdir()] == ["a.py"]
    assert (repository.tree / "a.py").read_text() == "x = 1\n"
    local = sources.fetch(str(root), tmp_path / "local")
    assert sorted(p.name for p in local.tree.iterdir()) == ["a.py"]
    with pytest.raises(TaskError, match=r"no revision 'nowhere'; tags: v1\.2\.0"):
        sources.fetch(f"git+file://{root}@nowhere", tmp_path / "bad")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "no folder '/no/such/folder'; a source is"),
        ("git+http://host/x@main", "cannot be read; write https"),
        ("git+file:///no/such/repository@main", "/no/such/repository cannot be cloned"),
        ("pypi:toolz", "does not name one version"),
        ("pypi:toolz>=1", "does not name one version"),
    ],
)
def test_bad_sources(source: str, message: str, tmp_path: Path):
    with pytest.raises(TaskError, match=message):
        sources.fetch(source, tmp_path / "copy")


def sdist(name: str, members: Mapping[str, str]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for path, text in members.items():
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return held.getvalue()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package index on this machine, which pip is configured to use."""
    root = tmp_path / "index"
    files = {
        "tiny-1.0.tar.gz": sdist("tiny-1.0", {"tiny.py": "x = 1\n", "tiny.egg-info/PKG-INFO": "x"}),
        "tiny-1.1-py3-none-any.whl": b"only a wheel",
        "tiny-1.2.tar.gz": sdist("tiny-1.2", {"../../escaped.py": "x = 1\n"}),
        "tiny-1.3.tar.gz": b"not an archive",
    }
    links = []
    for name, data in files.items():
        lay(root, {f"files/{name}": ""})
        (root / "files" / name).write_bytes(data)
        links.append(f'<a href="/files/{name}#sha256={hashlib.sha256(data).hexdigest()}">{name}</a>')
    (root / "files" / "tiny-1.4.tar.gz").write_bytes(b"changed on the way")
    links.append(f'<a href="/files/tiny-1.4.tar.gz#sha256={"0" * 64}">tiny-1.4.tar.gz</a>')
    lay(root, {"simple/tiny/index.html": "<html><body>" + "\n".join(links) + "</body></html>"})

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:  # type: ignore[override]
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=root)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("WOODSHED_CACHE", str(tmp_path / "cache"))
        yield root
        server.shutdown()


def test_sdists_come_verified_from_the_index(index: Path, tmp_path: Path):
    repository = sources.fetch("pypi:Tiny==1.0", tmp_path / "copy")
    assert [p.name for p in repository.tree.iterdir()] == ["tiny.py"]
    assert repository.sha256 == hashlib.sha256((index / "files/tiny-1.0.tar.gz").read_bytes()).hexdigest()
    shutil.rmtree(index)
    assert sources.fetch("pypi:tiny==1.0", tmp_path / "copy") == repository  # from the cache


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pypi:tiny==9.9", r"tiny has no version 9\.9; the newest are 1\.0, 1\.1"),
        ("pypi:tiny==1.1", r"tiny==1\.1 has no sdist \(only: wheel\)"),
        ("pypi:tiny==1.2", "cannot be unpacked"),
        ("pypi:tiny==1.3", "cannot be unpacked"),
        ("pypi:tiny==1.4", "sha256"),
        ("pypi:unheard-of==1", "knows no project 'unheard-of'"),
    ],
)
def test_bad_sdists(source: str, message: str, index: Path, tmp_path: Path):
    with pytest.raises(TaskError, match=message):
        sources.fetch(source, tmp_path / "copy")
    assert not (tmp_path / "escaped.py").exists() and not (tmp_path / "copy").exists()


# ---- projects ---------------------------------------------------------------------------------------------

BACKEND = '''
import os, zipfile

def build_wheel(out, config_settings=None, metadata_directory=None):
    name = "thing-1.5-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(out, name), "w") as wheel:
        for folder, _, files in os.walk("src/thing"):
            for file in files:
                wheel.write(os.path.join(folder, file), os.path.join(folder, file)[4:])
        wheel.writestr("thing/_version.py", f"version = {os.environ['SETUPTOOLS_SCM_PRETEND_VERSION']!r}\\n")
        wheel.writestr("thing-1.5.dist-info/METADATA", """Name: thing
Version: 1.5
Requires-Dist: left; python_version < "3"
Requires-Dist: right>=1
Requires-Dist: mock; extra == "test"
Requires-Dist: pytest-cov; extra == "test"
Provides-Extra: test
""")
        wheel.writestr("thing-1.5.dist-info/entry_points.txt", "[console_scripts]\\nthing = thing:main\\n")
    return name
'''
BUILT = {
    "pyproject.toml": """
        [build-system]
        requires = []
        build-backend = "backend"
        backend-path = ["tools"]

        [dependency-groups]
        test = ["freezegun", {include-group = "more"}]
        more = ["hypothesis>=6"]
        """,
    "tools/backend.py": BACKEND,
    "src/thing/__init__.py": "from ._version import version\n",
    "src/thing/tests/test_it.py": "",
    "tox.ini": "[testenv]\ndeps =\n    pytest>=3\n    py27: old\n    tabulate  # why\n    -r more.txt\n",
}


def test_metadata_is_built_in_the_sandbox(tmp_path: Path):
    repository = sources.fetch(str(lay(tmp_path / "thing", BUILT)), tmp_path / "tree")
    described = project.read(repository)
    assert described == project.Project(
        distribution="thing==1.5",
        packages=("thing",),
        source_roots=("src",),
        paths=("src/thing",),
        requirements=("right>=1",),
        test_requirements=("freezegun", "hypothesis>=6", "mock", "pytest", "tabulate"),
        generated=("src/thing/_version.py",),
        entry_points="[console_scripts]\nthing = thing:main\n",
        left_out=(
            "more.txt: no file of this repository",
            "pytest-cov: not needed by the tests, and no setting of pytest asks for it",
        ),
        inside=described.inside,
    )
    assert not described.inside.homes and not described.inside.elsewhere
    assert (repository.tree / "src/thing/_version.py").read_text() == "version = '0.0.0'\n"


EXTENDED = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"
NAMESPACES = {
    "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
    "backend.py": """
        import pathlib, zipfile

        def build_wheel(out, config_settings=None, metadata_directory=None):
            with zipfile.ZipFile(f"{out}/x.whl", "w") as wheel:
                for file in pathlib.Path("src").rglob("*.py"):
                    wheel.write(file, file.relative_to("src"))
                wheel.writestr("x.dist-info/METADATA", "Name: named.thing\\nVersion: 1\\n")
            return "x.whl"
        """,
    "src/plain/inner/core.py": "",
    "src/pkgutil_style/__init__.py": "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n",
    "src/pkgutil_style/one/__init__.py": "",
    "src/pkgutil_style/two.py": "",
    "src/resources_style/__init__.py": "__import__('pkg_resources').declare_namespace(__name__)\n",
    "src/resources_style/deep/__init__.py": EXTENDED,
    "src/resources_style/deep/er/__init__.py": "",
    "src/real/__init__.py": EXTENDED + "def f(): pass\n",
    "src/real/more.py": "",
    "src/loose/a.py": "",
    "src/loose/b/__init__.py": "",
    "src/named/thing.py": "",
    "src/named/tests/test_thing.py": "",
    "src/alone.py": "",
}


def test_of_a_namespace_what_the_distribution_brings_is_its_own(tmp_path: Path):
    described = project.read(sources.fetch(str(lay(tmp_path / "names", NAMESPACES)), tmp_path / "tree"))
    assert described.packages == (
        *("alone", "loose", "named.thing", "pkgutil_style.one", "pkgutil_style.two"),
        *("plain.inner", "real", "resources_style.deep.er"),
    )
    assert described.requirements == ("setuptools<82",)
    assert described.paths == (
        *(
            "src/alone.py",
            "src/loose",
            "src/named/thing.py",
            "src/pkgutil_style/one",
            "src/pkgutil_style/two.py",
        ),
        *("src/plain/inner", "src/real", "src/resources_style/deep/er"),
    )


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "raise RuntimeError('the compiler is missing')",
            r"its build with backend failed.*\n.*compiler is missing",
        ),
    ],
)
def test_builds_that_cannot_be_used(backend: str, message: str, tmp_path: Path):
    root = lay(tmp_path / "thing", {**BUILT, "tools/backend.py": backend})
    with pytest.raises(TaskError, match=f"(?s){message}"):
        project.read(sources.fetch(str(root), tmp_path / "tree"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"one.py": "x = 1\n"}, "one has no tests that pytest finds"),
        (
            {"one.py": "x = 1\n", "test_one.py": "import one\ndef test_x(): assert one.x == 2\n"},
            "assert 1 == 2",
        ),
        (
            {"one.py": "", "test_one.py": "import one, yaml\ndef test_x(): pass\n"},
            r"No module named 'yaml'.*'extra_requirements=\[\"pyyaml\"\]'",
        ),
        ({"one.py": "", "test_one.py": "def test_x(): pass\n"}, "never import one"),
        (
            {
                "one.py": "",
                "conftest.py": "pytest_plugins = ['nobody_has_this']\n",
                "test_one.py": "import one\n",
            },
            r"pytest does not run its tests.*Error importing plugin \"nobody_has_this\".*\nnobody_has_this: missing",
        ),
    ],
)
def test_suites_that_cannot_be_used(files: dict[str, str], message: str, tmp_path: Path):
    repository = sources.fetch(str(lay(tmp_path / "one", files)), tmp_path / "tree")
    with pytest.raises(TaskError, match=f"(?s){message}"):
        baseline.measure(repository)


def test_nobody_is_told_to_install_a_name_of_the_repository_or_of_a_module(tmp_path: Path):
    root = lay(
        tmp_path / "mono",
        {
            "one.py": "",
            "test_one.py": "import one, core\n",
            "test_two.py": "import one, wire.inner\n",
            "test_three.py": "import one, unheard_of\n",
            "test_four.py": "import one, yaml\n",
            "packages/core/pyproject.toml": "[project]\nname = 'acme-core'\n",
            "packages/core/src/core/__init__.py": "",
            "deep/down/wire/inner.py": "",
        },
    )
    repository = sources.fetch(str(root), tmp_path / "tree")
    with pytest.raises(TaskError) as raised:
        baseline.measure(repository, limits=suite.SuiteLimits(runs=1))
    said = str(raised.value)
    assert re.findall(r"extra_requirements=(\S*)'", said) == ['["pyyaml"]', '["NAME==VERSION"]']
    assert "core, wire: a name of this repository" in said and "\nunheard_of: missing" in said
    with pytest.raises(TaskError, match=r"Acme_Core is of the repository itself \(packages/core/src\)"):
        baseline.measure(repository, limits=suite.SuiteLimits(runs=1), extra_requirements=["Acme_Core>=1"])


def test_the_rest_of_a_shared_namespace_is_not_of_the_repository(tmp_path: Path):
    """zope.exceptions lacked zope.interface, and was told that this is a name of its own."""
    root = lay(
        tmp_path / "thing",
        {
            **{name: NAMESPACES[name] for name in ("pyproject.toml", "backend.py")},
            "src/named/thing/__init__.py": "",
            "deep/down/named/wire/__init__.py": "",
            "test_one.py": "import named.thing, named.elsewhere.inner\n",
            "test_two.py": "import named.thing, named.wire\n",
            "test_three.py": "import named.thing.gone\n",
        },
    )
    repository = sources.fetch(str(root), tmp_path / "tree")
    with pytest.raises(TaskError) as raised:
        baseline.measure(repository, limits=suite.SuiteLimits(runs=1))
    said = str(raised.value)
    assert "\nnamed.elsewhere: missing" in said
    assert "\nnamed.thing.gone, named.wire: a name of this repository" in said


def test_every_reason_code_has_its_meaning():
    package = Path(synthesis.__file__).parent
    texts = [path.read_text() for path in package.rglob("*.py")]
    codes = {code for text in texts for code in re.findall(r"\bRejected\(\s*\"(\w+)\"", text)}
    assert len(codes) > 20 and {*codes, stats.UNREAD} == set(stats.MEANINGS)


def test_a_requirement_that_cannot_be_had_costs_no_other_one(tmp_path: Path):
    """Nor does one that would bring a second copy of the package."""
    files = {
        "more_itertools.py": "",
        "test_one.py": "import freezegun, more_itertools, six\ndef test_x(): pass\n",
        "requirements-test.txt": "six\nfreezegun==0.0.0.0.1\njaraco.functools\n",
    }
    said: list[str] = []
    repository = sources.fetch(str(lay(tmp_path / "more_itertools", files)), tmp_path / "tree")
    found = baseline.measure(
        repository, limits=suite.SuiteLimits(runs=1), progress=lambda done, total, text: said.append(text)
    )
    assert found.stable == ("test_one.py::test_x",)
    reasons = [text for text in said if "not installed" in text]
    assert [text.partition("not installed: ")[2] for text in reasons] == [
        "freezegun==0.0.0.0.1: no package index has a wheel of it for this Python, and no package index has its source",
        "jaraco.functools: it requires a copy of what the repository itself holds",
    ]


def test_a_sibling_is_imported_from_where_it_lies(tmp_path: Path):
    root = lay(
        tmp_path / "mono",
        {
            "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
            "backend.py": NAMESPACES["backend.py"].replace(
                "Version: 1", "Version: 1\\nRequires-Dist: Acme.Core>=3"
            ),
            "src/app/__init__.py": "import acme_core\ndef f(): return acme_core.ONE\n",
            "packages/core/pyproject.toml": "[project]\nname = 'acme-core'\n",
            "packages/core/src/acme_core/__init__.py": "ONE = 1\n",
            "tests/test_app.py": "import app\ndef test_f(): assert app.f() == 1\n",
        },
    )
    found = baseline.measure(sources.fetch(str(root), tmp_path / "tree"), limits=suite.SuiteLimits(runs=1))
    assert found.stable == ("tests/test_app.py::test_f",) and found.allowed_paths == ("src/app",)
    assert found.environment.source_roots == ("src", "packages/core/src")
    (pin,) = (pin for pin in found.environment.requirements if pin.startswith("acme"))
    assert "+woodshed.x" in pin, "built from where it lies, never a stranger's of that name"


def test_a_package_that_pytest_needs_is_refused(tmp_path: Path):
    root = lay(tmp_path / "iniconfig", {"iniconfig.py": "", "test_it.py": "def test_x(): pass\n"})
    with pytest.raises(TaskError, match="iniconfig is needed by pytest"):
        baseline.measure(sources.fetch(str(root), tmp_path / "tree"))
