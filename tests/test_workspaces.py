"""Repositories of several packages: siblings by path, addresses, lock files, compiled extensions, other Pythons."""

from __future__ import annotations

import dataclasses
import os
import re
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import workspaces
from packaging.requirements import Requirement

from woodshed import synthesis
from woodshed.records import Environment, Task, TaskError
from woodshed.sandbox import BUBBLEWRAP
from woodshed.synthesis import (
    SynthesisSettings,
    builds,
    direct_wheels,
    locks,
    pins,
    project,
    requirements,
    setup_command,
    sources,
)
from woodshed.synthesis.members import members, source_of
from woodshed.synthesis.siblings import Origin, siblings, surroundings
from woodshed.synthesis.written_sources import relative, written
from woodshed.tasks import environment, interpreters
from woodshed.tasks.folder import writing


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks into, in which strangers offer packages of our names."""
    folder = tmp_path / "index"
    for name in ("core", "wire", "desk", "ledger", "base_lib"):
        workspaces.stranger(folder, name)
    monkeypatch.setenv("PIP_FIND_LINKS", f"{os.environ.get('PIP_FIND_LINKS', '')} {folder}")
    return folder


# ---- what is written ----------------------------------------------------------------------------------------

WRITTEN = {
    "uv": """
        [tool.uv.sources]
        core = { workspace = true }
        wire = [{ path = "../wire", marker = "sys_platform == 'linux'" }]
        far = { git = "git@host:owner/far.git", tag = "v1", subdirectory = "py" }
        near = { git = "https://host/near", rev = "abc" }
        file = { url = "https://host/file-1.0.tar.gz" }
        listed = { index = "ours" }
        """,
    "poetry": """
        [tool.poetry.dependencies]
        python = "^3.8"
        core = { path = "../core", develop = true }
        six = "^1.0"
        near = { git = "https://host/near", branch = "main" }
        [tool.poetry.group.test.dependencies]
        wire = { path = "../wire" }
        """,
    "pdm": """
        [tool.pdm.dev-dependencies]
        test = ["-e file:///${PROJECT_ROOT}/../core#egg=core", "near @ x", "git+https://host/near@v2#egg=near", 3]
        """,
}
EXPECTED = {
    "uv": {
        "core": "its workspace",
        "wire": "../wire",
        "far": "git+ssh://git@host/owner/far.git@v1#subdirectory=py",
        "near": "git+https://host/near@abc",
        "file": "https://host/file-1.0.tar.gz",
    },
    "poetry": {"core": "../core", "near": "git+https://host/near@main", "wire": "../wire"},
    "pdm": {"core": "../core", "near": "git+https://host/near@v2"},
}


@pytest.mark.parametrize("tool", WRITTEN)
def test_sources_are_read_where_each_tool_writes_them(tool: str, tmp_path: Path):
    workspaces.lay(tmp_path, {"pyproject.toml": WRITTEN[tool]})
    assert written(tmp_path) == EXPECTED[tool]


def test_file_addresses_of_hatch_and_pdm_are_relative_to_their_project():
    known = {
        "file:///workspace/../core": "../core",
        "file:///${PROJECT_ROOT}/../core": "../core",
        "file:../core": "../core",
        "{root:uri}/../core": "../core",
        "file:///workspace/libs/core": "libs/core",
        "file:///home/x/core": "",
        "https://host/core.whl": "",
    }
    assert {address: relative(address) for address in known} == known


LOCKS = {
    "uv.lock": """
        [[package]]
        name = "Six"
        version = "1.16.0"
        source = { registry = "https://host/simple" }
        [[package]]
        name = "core"
        version = "0.1.0"
        source = { editable = "packages/core" }
        [[package]]
        name = "near"
        version = "2.0"
        source = { git = "https://host/near?rev=main&subdirectory=py#0123abc" }
        [[package]]
        name = "forked"
        version = "1.0"
        [[package]]
        name = "forked"
        version = "2.0"
        """,
    "poetry.lock": """
        [[package]]
        name = "six"
        version = "1.16.0"
        [[package]]
        name = "pytest"
        version = "6.2.5"
        [[package]]
        name = "core"
        version = "1.0"
        source = { type = "directory", url = "../core" }
        [[package]]
        name = "near"
        version = "2.0"
        source = { type = "git", url = "https://host/near", resolved_reference = "0123abc", subdirectory = "py" }
        """,
    "pdm.lock": """
        [[package]]
        name = "six"
        version = "1.16.0"
        [[package]]
        name = "core"
        version = "1.0"
        path = "../core"
        [[package]]
        name = "near"
        version = "2.0"
        git = "https://host/near"
        revision = "0123abc"
        subdirectory = "py"
        """,
    "pylock.toml": """
        [[packages]]
        name = "six"
        version = "1.16.0"
        [[packages]]
        name = "near"
        vcs = { type = "git", url = "https://host/near", commit-id = "0123abc", subdirectory = "py" }
        """,
}


@pytest.mark.parametrize("name", LOCKS)
def test_lock_files_give_versions_and_commits(name: str, tmp_path: Path):
    workspaces.lay(tmp_path / "root", {name: LOCKS[name], "pdm.lock.bak": "["})
    lock = locks.read(tmp_path, tmp_path / "root", None)
    assert (lock.name, lock.versions) == (name, {"six": "1.16.0"})
    assert lock.addresses == {"near": "git+https://host/near@0123abc#subdirectory=py"}


@pytest.mark.parametrize(
    "text", ["[", "package = 3", "[[package]]\nname = 3", "[[package]]\nname = 'a'\nversion = 'x'"]
)
def test_an_odd_lock_file_counts_as_none(text: str, tmp_path: Path):
    workspaces.lay(tmp_path, {"uv.lock": text})
    assert locks.read(tmp_path).versions == {}


def test_members_of_roots(tmp_path: Path):
    uv = workspaces.uv_workspace(tmp_path / "uv")
    assert members(uv) == ["packages/core", "packages/desk", "packages/wire"]
    workspaces.lay(
        uv, {"pyproject.toml": '[tool.uv.workspace]\nmembers = ["packages/*"]\nexclude = ["packages/d*"]\n'}
    )
    assert members(uv) == ["packages/core", "packages/wire"]
    assert members(uv / "packages/core") == []
    assert members(workspaces.poetry_monorepo(tmp_path / "poetry")) == ["ledger", "shop"]
    assert members(workspaces.hatch_workspace(tmp_path / "hatch")) == ["libs/base_lib", "libs/tool_lib"]
    virtual = '[project]\nname = "all"\nversion = "0"\n[tool.uv.workspace]\nmembers = ["packages/*"]\n'
    assert len(members(workspaces.lay(uv, {"pyproject.toml": virtual}))) == 3
    assert members(workspaces.lay(uv, {"pyproject.toml": virtual + workspaces.SETUPTOOLS})) == []
    assert members(workspaces.lay(uv, {"pyproject.toml": virtual, "src/all/__init__.py": ""})) == []
    for odd in ('members = "x"', 'members = ["/etc", "../..", "", 3]', "members = {a = 1}\nexclude = 3"):
        root = workspaces.uv_workspace(tmp_path / "odd")
        workspaces.lay(root, {"pyproject.toml": f"[tool.uv.workspace]\n{odd}\n"})
        assert len(members(root)) == 3
    assert source_of("git+https://h/x@main", "libs/a") == "git+https://h/x@main#subdirectory=libs/a"
    assert source_of("git+https://h/x#subdirectory=py", "a") == "git+https://h/x#subdirectory=py/a"


def test_nothing_is_taken_from_outside_of_the_repository(tmp_path: Path):
    root = workspaces.lay(
        tmp_path, {"a/x/pyproject.toml": "[project]", "b/y/pyproject.toml": "[project]", "b/z": ""}
    )
    here = Origin(root / "a/x", root / "a")
    assert here.at("../x") == root / "a/x"
    assert [here.at(place) for place in ("../../b/y", "../../b", str(root / "a/x"), "../none")] == [None] * 4
    assert Origin(root / "a/x").at("../../b/y") == root / "b/y"
    assert Origin(root / "a/x").at("../../b") is None  # a folder that describes no project
    (root / "a/link").symlink_to(root / "b/y")
    assert here.at("../link") is None


# ---- wheels by address ------------------------------------------------------------------------------------------


def draft(source: Path | str, tmp_path: Path) -> tuple[str, ...]:
    """Pins of the environment of a source."""
    described = project.read(sources.fetch(str(source), tmp_path / "tree"))
    return pins.environment_of(described, (), BUBBLEWRAP)[0].requirements


def wheel_of(pin: str) -> Path:
    wheel = environment.built_wheel(pin)
    assert wheel is not None
    return wheel


def test_siblings_come_by_their_path_and_never_from_an_index(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each needs the others in a circle, and strangers offer newer releases of every name."""
    root = workspaces.uv_workspace(tmp_path / "team")
    lock = (
        '[[package]]\nname = "iniconfig"\nversion = "2.0.0"\n[[package]]\nname = "core"\nversion = "99.0"\n'
    )
    pinned = draft(workspaces.lay(root, {"uv.lock": lock}) / "packages/desk", tmp_path)
    assert "iniconfig==2.0.0" in pinned
    ours = {pin.partition("==")[0]: pin for pin in pinned if environment.BUILT.search(pin)}
    assert ours.keys() == {"core", "wire"}
    assert all(pin.startswith(f"{name}==0.1.0+woodshed.") for name, pin in ours.items())
    assert not any("99.0" in pin for pin in pinned)
    for pin in ours.values():
        assert wheel_of(pin).parent == environment.built_wheels()
        with zipfile.ZipFile(wheel_of(pin)) as bundle:
            (metadata,) = (name for name in bundle.namelist() if name.endswith("METADATA"))
            assert b"Requires-Dist" not in bundle.read(metadata)
    shipped = Environment(interpreters.OURS, pinned, ("desk",))
    text = writing._dockerfile(shipped)
    assert "COPY wheels/ /wheels/" in text
    assert f"'core @ file:///wheels/{wheel_of(ours['core']).name.replace('+', '%2B')}'" in text
    names = {f"environment/wheels/{wheel_of(pin).name}" for pin in ours.values()}
    assert writing._wheels(shipped).keys() == names
    monkeypatch.setenv("WOODSHED_CACHE", str(tmp_path / "other machine"))
    with pytest.raises(TaskError, match=r"is never fetched from a package index.*PIP_FIND_LINKS=TASK"):
        environment.built_wheel(ours["core"])


@pytest.mark.slow
def test_git_is_built_at_its_locked_commit(index: Path, tmp_path: Path):
    commit = workspaces.git_repository(tmp_path / "remote")
    workspaces.lay(tmp_path / "remote", {"src/remote/__init__.py": "LATER = 1\n"})
    workspaces.git(tmp_path / "remote", "commit", "--quiet", "--all", "-m", "two")
    text = f'[project]\nname = "user"\nversion = "1"\ndependencies = ["remote"]\n{workspaces.SETUPTOOLS}'
    text += f'[tool.uv.sources]\nremote = {{ git = "file://{tmp_path}/remote", branch = "main" }}\n'
    lock = f'[[package]]\nname = "remote"\nversion = "2.0"\nsource = {{ git = "file://{tmp_path}/remote#{commit}" }}\n'
    lock += '[[package]]\nname = "iniconfig"\nversion = "2.0.0"\n'
    files = {"pyproject.toml": text, "uv.lock": lock, **workspaces.package("user", ("remote",))}
    task = made(workspaces.lay(tmp_path / "user", files), tmp_path / "out", limit=1).accepted[0]
    pinned = task.environment.requirements
    (pin,) = (pin for pin in pinned if pin.startswith("remote==2.0+woodshed."))
    assert "iniconfig==2.0.0" in pinned
    with zipfile.ZipFile(wheel_of(pin)) as bundle:
        assert b"remote_total" in bundle.read("remote/__init__.py")
    assert (task.folder / "environment/wheels" / wheel_of(pin).name).is_file() and synthesis.check(task) == []


def test_what_cannot_be_built_is_said_with_the_way_out(index: Path, tmp_path: Path):
    text = '[project]\nname = "user"\nversion = "1"\n[build-system]\nrequires = ["maturin>=1,<2"]\n'
    root = workspaces.lay(tmp_path / "rust", {"pyproject.toml": text + 'build-backend = "maturin"\n'})
    with pytest.raises(TaskError, match=r"compiles Rust \(maturin\).*C and Cython only"):
        project.read(sources.fetch(str(root), tmp_path / "tree"))
    wheels = direct_wheels.DirectWheels("user", interpreters.OURS, BUBBLEWRAP)
    with pytest.raises(
        TaskError, match=r"gone, required from git\+file:///nowhere, cannot be built: .*cloned"
    ):
        wheels.pinned(["six", "gone @ git+file:///nowhere"])
    with pytest.raises(TaskError, match="not the one that is written"):
        wheels.pinned([f"core @ {next(index.glob('core*')).as_uri()}#sha256={'0' * 64}"])
    with pytest.raises(TaskError, match="no file to install"):
        wheels.pinned(["page @ http://localhost:9/page.html"])


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            "x.c:2:10: fatal error: ffi.h: No such file or directory",
            "lacks the header ffi.h: install the package",
        ),
        ("error: command 'gcc' failed: No such file or directory", "lacks a C compiler"),
        ("unable to execute 'gcc': No such file or directory", "lacks a C compiler"),
        ("/usr/bin/ld: cannot find -lxml2: No such file or directory", r"lacks a library \(-lxml2\)"),
    ],
)
def test_what_a_compilation_lacks_is_named(printed: str, said: str):
    assert re.search(said, builds._way_out(printed))
    assert builds._way_out("error: something else") == ""


def test_an_application_that_names_no_build_is_taken_as_it_lies(tmp_path: Path):
    """setuptools refuses two packages side by side; uv never builds what names no build system."""
    told = """
        [project]
        name = "Till"
        version = "1"
        dependencies = ["six"]
        [project.optional-dependencies]
        test = ["freezegun; python_version > '3'", "attrs"]
        """
    root = workspaces.lay(
        tmp_path / "app", {"pyproject.toml": told, "till/__init__.py": "", "web/__init__.py": ""}
    )
    found = sources.fetch(str(workspaces.lay(root, {"tests/__init__.py": ""})), tmp_path / "tree")
    described = project.read(found)
    assert (described.packages, described.requirements) == (("till", "web"), ("six",))
    assert described.distribution == "till==1" and described.test_requirements == ("attrs", "freezegun")
    assert "tests/__init__.py" not in builds.contents_of("till", builds.as_it_is(found))
    workspaces.lay(found.tree, {"pyproject.toml": told + workspaces.SETUPTOOLS})
    with pytest.raises(TaskError, match="package discovery"):
        project.read(found)


def test_a_sibling_is_found_by_name_whatever_address_the_build_wrote(tmp_path: Path):
    root = workspaces.poetry_monorepo(tmp_path / "team")
    inside = siblings(root / "shop", "shop", (), Origin(root / "shop"))
    assert inside.source("Ledger") == (root / "ledger").as_uri() and inside.holds("ledger")
    address_of = requirements.source_of
    assert address_of(Requirement("ledger @ file:///ledger"), inside) == (root / "ledger").as_uri()
    assert address_of(Requirement("six @ git+https://h/six"), inside) == "git+https://h/six"
    assert address_of(Requirement("six"), inside) == ""


def test_a_sibling_that_is_imported_and_not_declared_comes_by_its_path(tmp_path: Path):
    root = workspaces.uv_workspace(tmp_path / "team")
    tree = workspaces.lay(
        tmp_path / "tree", {"x/__init__.py": "import json, six\nfrom core.linked import y\nimport x\n"}
    )
    beside = [("core", "../core"), ("six", "../none"), ("x", "../desk"), ("json", "../wire")]
    inside = siblings(tree, "x", beside, Origin(root / "packages/new", root))
    assert requirements.find(tree, message_from_string("Name: x\n"), inside).tests == [
        f"core @ {(root / 'packages/core').as_uri()}"
    ]


def test_the_root_of_a_repository_says_what_holds_for_its_members(tmp_path: Path):
    root = workspaces.uv_workspace(tmp_path / "team")
    told = """
        [dependency-groups]
        dev = ["pytest-mock", "ruff"]
        [tool.uv.workspace]
        members = ["packages/*"]
        [tool.pytest.ini_options]
        addopts = ["-m", "not slow", "--timeout=30"]
        markers = ["slow: takes long", "odd: is odd"]
        testpaths = ["packages"]
        xfail_strict = true
        """
    workspaces.lay(
        root, {"conftest.py": "import os, pytest\n", "requirements-dev.txt": "freezegun\n-e packages/desk\n"}
    )
    workspaces.lay(root, {"pyproject.toml": told})
    fetched = sources.fetch(str(root / "packages/core"), tmp_path / "tree")
    assert (fetched.tree / "conftest.py").read_text() == "import os, pytest\n"
    assert (fetched.tree / "pytest.ini").read_text() == (
        "[pytest]\naddopts = -m 'not slow' --timeout=30\nmarkers = \n    slow: takes long\n    odd: is odd\n"
        "xfail_strict = true\n"
    )
    inside = siblings(fetched.tree, "core", fetched.beside, fetched.origin)
    read = requirements.find(fetched.tree, message_from_string("Name: core\n"), inside)
    desk, wire = ((root / f"packages/{name}").as_uri() for name in ("desk", "wire"))
    assert read.tests == [f"desk @ {desk}", "freezegun", "pytest-mock", f"wire @ {wire}"]
    assert read.demanded == ["pytest-timeout"]
    workspaces.lay(root, {"conftest.py": "from packages import x\n"})
    assert not (sources.fetch(str(root / "packages/core"), tmp_path / "tree").tree / "conftest.py").exists()
    workspaces.lay(root, {"packages/core/pytest.ini": "[pytest]\naddopts = -q\n"})
    own = sources.fetch(str(root / "packages/core"), tmp_path / "tree")
    assert (own.tree / "pytest.ini").read_text() == "[pytest]\naddopts = -q\n"


def test_an_application_takes_a_library_from_a_folder_beside_it(tmp_path: Path):
    root = workspaces.applications(tmp_path / "shop")
    assert members(root) == ["libs/money", "services/till"]
    fetched = sources.fetch(str(root / "services/till"), tmp_path / "tree")
    assert sorted(path.name for path in fetched.tree.iterdir()) == ["requirements.txt", "tests", "till"]
    inside = siblings(fetched.tree, "till", fetched.beside, fetched.origin)
    read = requirements.find(fetched.tree, message_from_string("Name: till\n"), inside)
    assert read.tests == [f"money @ {(root / 'libs/money').as_uri()}", "six==1.17.0"]


def test_what_lies_around_a_member_is_known_by_its_contents(tmp_path: Path):
    root = workspaces.uv_workspace(tmp_path / "team")

    def around() -> str:
        found = sources.fetch(str(root / "packages/desk"), tmp_path / "tree")
        return surroundings(found.tree, found.beside, found.origin)

    seen = [around(), around()]
    for path in ("packages/core/src/core/__init__.py", "uv.lock"):
        workspaces.lay(root, {path: "# other\n"})
        seen.append(around())
    workspaces.lay(root, {"packages/desk/src/desk/more.py": "", "README.md": "x"})
    assert seen[0] == seen[1] != "" and len({*seen}) == 3 and around() == seen[-1]


def test_a_setup_command_writes_what_every_task_holds(tiny_task: Task, tmp_path: Path):
    tree = workspaces.lay(tmp_path / "tree", {"tally/__init__.py": "", "README": "", "old.txt": "1"})
    told = "mkdir -p tally/gen dist && echo 'X = 1' > tally/gen/x.py && rm README && echo 2 > old.txt"
    told += " && touch a.pyc dist/y && python -c 'import pytest, tally'"
    repository = sources.Repository("tally", "1", tree, "", "", "", setup=told)
    assert setup_command.run(repository, tiny_task.environment, BUBBLEWRAP) == ("old.txt", "tally/gen/x.py")
    assert (tree / "tally/gen/x.py").read_text() == "X = 1\n" and (tree / "old.txt").read_text() == "2\n"
    assert (tree / "README").exists() and not (tree / "dist").exists()
    broken = dataclasses.replace(repository, setup="echo first; echo 'proto: not found' >&2; exit 3")
    with pytest.raises(
        TaskError, match=r"(?s)setup=.echo first.*failed \(nonzero.*no network.*proto: not found"
    ):
        setup_command.run(broken, tiny_task.environment, BUBBLEWRAP)


# ---- Pythons ------------------------------------------------------------------------------------------------


def test_a_python_is_chosen_by_requires_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for version in ("3.12", "3.14"):
        place = tmp_path / f"versions/{version}.1/bin/python{version}"
        workspaces.lay(place.parent, {place.name: ""})
    workspaces.lay(tmp_path / "shims", {"python3.13": "#!/bin/sh\n"})
    (tmp_path / "shims/python3.13").chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.setattr(interpreters, "OURS", "3.11")
    assert interpreters.choose(">=3.8") == "3.11"
    assert interpreters.choose(">=3.12") == "3.14"
    assert interpreters.choose(">=3.12,<3.13") == "3.12"
    assert interpreters.choose("==3.13.*") == "3.11"  # a shim is no Python; the wheel's metadata refuses ours
    assert interpreters.find("3.12") == (tmp_path / "versions/3.12.1/bin/python3.12").resolve()
    with pytest.raises(TaskError, match="none of uv or pyenv"):
        interpreters.find("3.13")
    with pytest.raises(TaskError, match=r"python=3\.8: .* choose one of these"):
        sources.fetch(str(tmp_path), tmp_path / "tree", python="3.8")


# ---- proven tasks --------------------------------------------------------------------------------------------


def made(source: Path | str, out: Path, **changes: object) -> synthesis.MakeReport:
    settings = SynthesisSettings(operators=("stub",), timeout_s=300, **changes)  # type: ignore[arg-type]
    return synthesis.make([str(source)], out, settings)


NEEDED = {
    **{"core": {"wire"}, "wire": {"core"}, "desk": {"core", "wire"}},
    **{"till": {"money"}, "money": set()},
    **{"ledger": set(), "shop": {"ledger"}, "base-lib": set(), "tool-lib": {"base-lib"}},
}
"""Siblings of each member."""


def member_of(task: Task) -> str:
    return task.name.partition("-stub-")[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uv_workspace", "poetry_monorepo", "hatch_workspace", "applications"])
def test_every_member_of_a_root_becomes_proven_tasks(kind: str, index: Path, tmp_path: Path):
    root = getattr(workspaces, kind)(tmp_path / "team")
    report = made(root, tmp_path / "out")
    names = [sources.plain_name(place.rpartition("/")[2]) for place in members(root)]
    assert sorted(map(member_of, report.accepted)) == sorted(2 * names) and not report.notes
    for task in report.accepted:
        built = {pin.partition("==")[0] for pin in task.environment.requirements if "+woodshed." in pin}
        assert built == NEEDED[member_of(task)]
    assert synthesis.check(report.accepted[-1]) == []


def test_members_none_of_which_can_be_used_are_all_named(tmp_path: Path):
    files = {
        f"{place}/{name}": "" for place in ("a/web", "b/web") for name in ("requirements.txt", "tests/x.txt")
    }
    with pytest.raises(TaskError) as raised:
        made(workspaces.lay(tmp_path / "team", files), tmp_path / "out")
    said = str(raised.value).splitlines()
    assert [line.partition(": no package")[0] for line in said] == [
        "a/web: no tasks: a-web",  # two members with the same last name have their whole places
        "b/web: no tasks: b-web",
    ]


@pytest.mark.slow
def test_a_member_inside_of_the_package_is_imported_from_there_and_has_its_metadata(
    index: Path, tmp_path: Path
):
    report = made(workspaces.uv_package(tmp_path / "suite"), tmp_path / "out")
    assert {task.target_symbol for task in report.accepted} == {"suite_mean", "suite_total"}
    for task in report.accepted:
        assert task.environment.source_roots == ("src", "packages/core/src")
        assert "tests/test_about.py::test_core" in (*task.pass_to_pass, *task.fail_to_pass)
        (pin,) = (pin for pin in task.environment.requirements if pin.startswith("core=="))
        with zipfile.ZipFile(wheel_of(pin)) as bundle:
            assert not any(name.endswith(".py") for name in bundle.namelist())


@pytest.mark.slow
def test_a_compiled_extension_is_built_and_its_callers_become_tasks(tmp_path: Path):
    report = made(workspaces.compiled_project(tmp_path / "fast"), tmp_path / "out")
    assert {task.target_symbol for task in report.accepted} == {"add_all", "fast_mean", "fast_total"}
    assert all(synthesis.check(task) == [] for task in report.accepted)


@pytest.mark.slow
def test_a_repository_for_another_python_becomes_tasks(tmp_path: Path):
    other = next(
        (v for v in ("3.13", "3.12") if v != interpreters.OURS and any(interpreters._places(v))), None
    )
    if other is None:
        pytest.skip("no other Python that Woodshed knows is on this machine")
    text = (
        f'[project]\nname = "newer"\nversion = "1"\nrequires-python = "=={other}.*"\n{workspaces.SETUPTOOLS}'
    )
    root = workspaces.lay(tmp_path / "newer", {"pyproject.toml": text, **workspaces.package("newer")})
    (task, _) = made(root, tmp_path / "out").accepted
    assert task.environment.python == other and synthesis.check(task) == []
