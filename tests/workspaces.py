"""Repositories of several packages, as teams have them: workspaces of uv and hatch, poetry's path dependencies, git."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

CODE = '''\
"""Numbers of {name}."""

{imports}

def {name}_total(values):
    """The sum of the values, each at least zero."""
    total = 0
    for value in values:
        total += max(value, 0)
    return total


def {name}_mean(values):
    """The mean of the values, each at least zero; 0 of none."""
    values = list(values)
    if not values:
        return 0
    return sum(max(value, 0) for value in values) / len(values)
'''
TEST = """\
from {module} import {name}_mean, {name}_total
{imports}

def test_total():
    assert {name}_total([1, 2, -5]) == 3
    assert {name}_total([]) == 0


def test_mean():
    assert {name}_mean([1, 2, -5]) == 1
    assert {name}_mean([]) == 0


def test_others():
    assert [{uses}] == [6] * {count}
"""


def package(name: str, uses: tuple[str, ...] = (), root: str = "src", module: str = "") -> dict[str, str]:
    """Files of a package with two functions and their tests, which call those of other packages."""
    module = module or name
    imports = "".join(f"from {other} import {other}_total\n" for other in uses)
    called = ", ".join(f"{other}_total([1, 2, 3])" for other in uses)
    return {
        f"{root}/{module}/__init__.py": CODE.format(name=name, imports=""),
        f"{root}/{module}/linked.py": f'"""Other packages."""\n\n{imports}',
        f"tests/test_{name}.py": TEST.format(
            name=name, module=module, imports=imports, uses=called, count=len(uses)
        ),
    }


def lay(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(textwrap.dedent(text), encoding="utf-8")
    return root


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{path}": text for path, text in files.items()}


SETUPTOOLS = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
"""
HATCHLING = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
"""
POETRY = """
[build-system]
requires = ["poetry-core"]
build-backend = "poetry.core.masonry.api"
"""


def uv_workspace(root: Path) -> Path:
    """Three members below a root without a package, which need each other in a circle."""
    files = {"pyproject.toml": '[tool.uv.workspace]\nmembers = ["packages/*"]\n'}
    for name, others in {"core": ("wire",), "wire": ("core",), "desk": ("core", "wire")}.items():
        sources = "".join(f"{other} = {{ workspace = true }}\n" for other in others)
        project = (
            f'[project]\nname = "{name}"\nversion = "0.1.0"\ndependencies = {list(others)}\n{SETUPTOOLS}'
        )
        files |= below(f"packages/{name}", package(name, others))
        files[f"packages/{name}/pyproject.toml"] = f"{project}\n[tool.uv.sources]\n{sources}"
    return lay(root, files)


def uv_package(root: Path) -> Path:
    """A package at the root of a workspace, with a member inside whose version its code reads."""
    files = package("suite", ("core",))
    files["packages/core/src/core/__init__.py"] = (
        "def core_total(values):\n    return sum(v for v in values if v > 0)\n"
    )
    files["src/suite/about.py"] = "from importlib.metadata import version\n\nCORE = version('core')\n"
    files["tests/test_about.py"] = (
        "from suite.about import CORE\n\n\ndef test_core():\n    assert CORE.startswith('0.1.0')\n"
    )
    text = f'[project]\nname = "suite"\nversion = "1.0"\ndependencies = ["core"]\n{SETUPTOOLS}'
    text += '[tool.uv.workspace]\nmembers = ["packages/*"]\n[tool.uv.sources]\ncore = { workspace = true }\n'
    files["pyproject.toml"] = text + '[tool.pytest.ini_options]\ntestpaths = ["tests"]\n'
    files["packages/core/pyproject.toml"] = f'[project]\nname = "core"\nversion = "0.1.0"\n{SETUPTOOLS}'
    return lay(root, files)


def poetry_monorepo(root: Path) -> Path:
    """Two projects side by side, the one with a path dependency on the other."""
    files = {}
    for name, others in {"ledger": (), "shop": ("ledger",)}.items():
        paths = "".join(f'{other} = {{ path = "../{other}", develop = true }}\n' for other in others)
        text = f'[tool.poetry]\nname = "{name}"\nversion = "1.2.0"\ndescription = ""\nauthors = []\n'
        text += f'[tool.poetry.dependencies]\npython = "^3.8"\n{paths}{POETRY}'
        files |= below(name, {"pyproject.toml": text, **package(name, others, root=".")})
    return lay(root, files)


def hatch_workspace(root: Path) -> Path:
    """Two projects that hatch builds, the one with a relative reference to the other."""
    files = {"pyproject.toml": '[tool.hatch.envs.default]\nworkspace.members = ["libs/*"]\n'}
    for name, others in {"base_lib": (), "tool_lib": ("base_lib",)}.items():
        needs = "".join(f'"{other} @ {{root:uri}}/../{other}"' for other in others)
        text = f'[project]\nname = "{name}"\ndynamic = ["version"]\ndependencies = [{needs}]\n{HATCHLING}'
        text += f'[tool.hatch.version]\npath = "src/{name}/about.py"\n[tool.hatch.metadata]\n'
        text += "allow-direct-references = true\n"
        about = {f"src/{name}/about.py": '__version__ = "3.1"\n', "pyproject.toml": text}
        files |= below(f"libs/{name}", package(name, others) | about)
    return lay(root, files)


def applications(root: Path) -> Path:
    """A repository of git whose service has requirement files alone, and takes a library from a folder beside it."""
    digest = "4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274"
    needs = f"-e ../../libs/money\nsix==1.17.0 --hash=sha256:{digest}\n"
    files = below("services/till", {"requirements.txt": needs, **package("till", ("money",), root=".")})
    setup = "from setuptools import setup\n"
    setup += "setup(name='money', version='1.0', package_dir={'': 'src'}, packages=['money'])\n"
    files |= below("libs/money", {"setup.py": setup, **package("money")})
    lay(root, files)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "one")
    return lay(root, {"services/till/untracked.py": "SECRET = 1\n"})


def git_repository(root: Path) -> str:
    """A package that no index has, in git; its commit."""
    text = f'[project]\nname = "remote"\nversion = "2.0"\n{SETUPTOOLS}'
    lay(root, {"pyproject.toml": text, **package("remote")})
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "one")
    return git(root, "rev-parse", "HEAD")


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *who, "-C", str(root), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def compiled_project(root: Path) -> Path:
    """A package with an extension in C, which its Python code calls."""
    setup = (
        "from setuptools import Extension, setup\n"
        "setup(name='fast', version='1.0', packages=['fast'], ext_modules=[Extension('fast._add', ['fast/_add.c'])])\n"
    )
    files = package("fast", root=".") | {"setup.py": setup, "fast/_add.c": EXTENSION}
    files["fast/adding.py"] = ADDING
    files["tests/test_adding.py"] = ADDING_TEST
    return lay(root, files)


EXTENSION = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *add(PyObject *self, PyObject *args)
{
    long a, b;
    if (!PyArg_ParseTuple(args, "ll", &a, &b))
        return NULL;
    return PyLong_FromLong(a + b);
}

static PyMethodDef methods[] = {{"add", add, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_add", "", -1, methods};

PyMODINIT_FUNC PyInit__add(void) { return PyModule_Create(&module); }
"""
ADDING = '''\
"""Adding, by the extension."""

from fast._add import add


def add_all(values):
    """The sum of whole numbers."""
    total = 0
    for value in values:
        total = add(total, value)
    return total
'''
ADDING_TEST = """\
from fast.adding import add_all


def test_add_all():
    assert add_all([1, 2, 3]) == 6
    assert add_all([]) == 0
"""


def stranger(folder: Path, name: str, version: str = "99.0") -> Path:
    """A wheel of a name that somebody else has taken, in a folder that pip looks into."""
    from woodshed.synthesis import direct_wheels

    stem = f"{name}-{version}"
    contents = {
        f"{name}/__init__.py": b"raise SystemExit('a stranger is here')\n",
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": direct_wheels.PLAIN,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}-py3-none-any.whl").write_bytes(direct_wheels.packed(contents, stem))
    return folder
