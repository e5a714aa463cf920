"""Task folders and environments: what is written is read back, what is damaged is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import venv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from business import private_wheel

from woodshed import tasks
from woodshed.records import Environment, Task, TaskError, to_json
from woodshed.sandbox import SandboxSpec, open_sandbox
from woodshed.tasks import environment, folder
from woodshed.tasks.folder import reading


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def copy(task: Task, target: Path) -> Path:
    return Path(shutil.copytree(task.folder, target, symlinks=True))


# Folders


def test_a_task_is_read_as_it_was_written(tiny_task: Task):
    loaded = tasks.load(tiny_task.folder)
    assert loaded == tiny_task
    assert loaded.folder == tiny_task.folder
    assert set(tasks.protected_files(loaded)) == {
        "pyproject.toml",
        "tests/conftest.py",
        "tests/test_table.py",
        "tests/test_words.py",
    }
    assert b"test_count" in tasks.protected_files(loaded)["tests/test_words.py"]
    gold = tasks.gold_patch(loaded)
    assert list(gold.files) == ["tally/words.py"]
    assert '-    raise NotImplementedError("count")\n+    found = {}\n' in gold.diff


def test_the_agent_sees_neither_hidden_tests_nor_the_solution(tiny_task: Task):
    shown = contents(tiny_task.folder / "environment")
    assert not any(b"test_count" in data or b"found[word]" in data for data in shown.values())


def test_writing_is_deterministic_and_the_id_ignores_the_name(tiny_task: Task, tmp_path: Path):
    def again(name: str) -> Task:
        return folder.write(
            dataclasses.replace(tiny_task, name="x", id="x"),
            tmp_path / name,
            workspace=tiny_task.folder / "environment/workspace",
            tests=tasks.protected_files(tiny_task),
            gold={path: (text or "").encode() for path, text in tasks.gold_patch(tiny_task).files.items()},
        )

    first, second = again(f"a/{tiny_task.name}"), again("other-name")
    assert contents(first.folder) == contents(tiny_task.folder)
    assert first.id == second.id == tiny_task.id
    assert second.name == "other-name"


def test_a_gold_patch_may_delete_files(tiny_task: Task, tmp_path: Path):
    gold = {"tally/words.py": None, "tally/new.py": b"x = 1\n"}
    task = folder.write(
        tiny_task, tmp_path / "t", workspace=tiny_task.folder / "environment/workspace", tests={}, gold=gold
    )
    assert tasks.gold_patch(tasks.load(task.folder)).files == {
        "tally/new.py": "x = 1\n",
        "tally/words.py": None,
    }


def test_harbor_finds_what_it_needs(tiny_task: Task):
    toml = tomllib.loads((tiny_task.folder / "task.toml").read_text("utf-8"))
    assert toml["schema_version"] == "1.4"
    assert toml["task"]["name"] == f"woodshed/{tiny_task.name}"
    assert [artifact["source"] for artifact in toml["artifacts"]] == ["/workspace/tally"]
    assert toml["agent"]["user"] == "agent"
    assert toml["verifier"] == {
        "timeout_sec": 120.0,
        "environment_mode": "separate",
        "network_mode": "no-network",
    }
    dockerfile = (tiny_task.folder / "environment/Dockerfile").read_text("utf-8")
    assert f"FROM python:{tiny_task.environment.python}-slim" in dockerfile
    assert all(f"'{pin}'" in dockerfile for pin in tiny_task.environment.requirements)


Damage = Callable[[Path], object]


def edit(path: str, old: str, new: str) -> Damage:
    def change(root: Path) -> None:
        text = (root / path).read_text("utf-8")
        assert old in text
        (root / path).write_text(text.replace(old, new), "utf-8")

    return change


def put(path: str, data: bytes) -> Damage:
    return lambda root: (root / path).write_bytes(data)


def remove(path: str) -> Damage:
    return lambda root: shutil.rmtree(root / path) if (root / path).is_dir() else (root / path).unlink()


def link(path: str, target: str) -> Damage:
    return lambda root: (root / path).symlink_to(target)


def both(*damages: Damage) -> Damage:
    return lambda root: [damage(root) for damage in damages]


def verifier(line: str) -> Damage:
    return edit("task.toml", "[verifier]\n", f"[verifier]\n{line}\n")


WORKSPACE, HIDDEN = "environment/workspace", "tests/files"
DAMAGE: dict[str, tuple[Damage, str]] = {
    "no instruction": (remove("instruction.md"), "lacks instruction.md"),
    "no expected tests": (remove("tests/expected.json"), "lacks tests/expected.json"),
    "no workspace": (remove(WORKSPACE), "lacks environment/workspace"),
    "not TOML": (put("task.toml", b"a ="), "cannot be read"),
    "metadata is no table": (
        put("task.toml", b'schema_version = "1.4"\nmetadata = 3\n'),
        "not made by Woodshed",
    ),
    "deep expected tests": (put("tests/expected.json", b"[" * 100_000), "nested more than 100 levels"),
    "deep table": (put("task.toml", b"x = " + b"[" * 2000), "nested more than 100 levels"),
    "long number": (edit("task.toml", "level = 1", "level = " + "1" * 5000), "more than 128 bits"),
    "another schema": (edit("task.toml", '"1.4"', '"2.0"'), "schema_version = '2.0'"),
    "not ours": (edit("task.toml", "metadata.woodshed", "metadata.other"), "not made by Woodshed"),
    "wrong type": (edit("task.toml", "level = 1", 'level = "1"'), "level = '1'"),
    "unknown key": (edit("task.toml", "level = 1", "level = 1\nlevle = 2"), "unknown key 'levle'"),
    "open network": (edit("task.toml", '"no-network"', '"public"'), "network_mode = 'public'"),
    "all allowed": (edit("task.toml", '"tally",\n]\ntest_c', '".",\n]\ntest_c'), "allowed path '.'"),
    "unknown verifier key": (
        edit("task.toml", "timeout_sec = 120.0", "timeout = 1"),
        "unknown key verifier.timeout;",
    ),
    "verifier without time": (
        edit("task.toml", "timeout_sec = 120.0", "timeout_sec = 0"),
        "timeout_sec = 0; expected",
    ),
    "verifier as root": (verifier('user = "root"'), "verifier.user = 'root', which is not honoured"),
    "verifier online": (
        verifier('allowed_hosts = ["index.example"]'),
        "verifier.allowed_hosts = ['index.example']",
    ),
    "verifier in an image": (verifier('environment = {docker_image = "x"}'), "the task's own environment"),
    "verifier collects": (verifier('collect = [{command = "ls"}]'), "nothing but the allowed paths"),
    "variables for pytest": (verifier('env = {A = "1"}'), "only verifier = 'command' honours"),
    "no F2P": (put("tests/expected.json", b'{"fail_to_pass": [], "pass_to_pass": []}'), "nothing to learn"),
    "expected is a list": (put("tests/expected.json", b"[]"), "not made by Woodshed"),
    "not UTF-8": (put("instruction.md", b"caf\xe9"), "is not UTF-8"),
    "workspace changed": (edit(f"{WORKSPACE}/tally/table.py", "limit=3", "limit=4"), "hash to"),
    "workspace grew": (put(f"{WORKSPACE}/tally/more.py", b""), "hash to"),
    "script may run": (lambda root: (root / WORKSPACE / "tally/table.py").chmod(0o755), "hash to"),
    "hidden test changed": (edit(f"{HIDDEN}/tests/test_table.py", "2)", "3)"), "hash to"),
    "instruction changed": (edit("instruction.md", "Implement", "Delete"), "hash to"),
    "link out of the task": (link(f"{WORKSPACE}/tally/x", "/etc/passwd"), "leaves"),
    "link to the tests": (link(f"{WORKSPACE}/x", "../../tests/files"), "leaves"),
    "link through a link": (both(link(f"{HIDDEN}/a", "."), link(f"{HIDDEN}/b", "a/../../../..")), "leaves"),
    "link to itself": (link(f"{WORKSPACE}/x", "x"), "leaves"),
    "tests elsewhere": (both(remove(HIDDEN), link(HIDDEN, "/etc")), "leaves"),
    "a pipe": (lambda root: os.mkfifo(root / WORKSPACE / "x"), "neither a file nor a folder"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folders_are_refused_by_name(tiny_task: Task, tmp_path: Path, name: str):
    damage, said = DAMAGE[name]
    root = copy(tiny_task, tmp_path / tiny_task.name)
    damage(root)
    with pytest.raises(TaskError) as caught:
        tasks.load(root)
    assert said in str(caught.value)


def test_links_inside_the_workspace_are_kept(tiny_task: Task, tmp_path: Path):
    workspace = Path(shutil.copytree(tiny_task.folder / "environment/workspace", tmp_path / "workspace"))
    (workspace / "tally/alias.py").symlink_to("words.py")
    task = folder.write(
        tiny_task, tmp_path / "t", workspace=workspace, tests=tasks.protected_files(tiny_task), gold={}
    )
    assert (tasks.load(task.folder).folder / "environment/workspace/tally/alias.py").is_symlink()


def test_nothing_is_left_of_a_task_that_cannot_be_written(tiny_task: Task, tmp_path: Path):
    def write(target: Path, **changes: object) -> None:
        gold = {"../outside": b"x"} if target.name == "escape" else {}
        workspace = tiny_task.folder / "environment/workspace"
        folder.write(
            dataclasses.replace(tiny_task, **changes), target, workspace=workspace, tests={}, gold=gold
        )

    with pytest.raises(TaskError, match="exists already"):
        write(tiny_task.folder)
    with pytest.raises(TaskError, match="would let tests or configuration cross"):
        write(tmp_path / "a", allowed_paths=("tests",))
    with pytest.raises(TaskError, match="provenance"):
        write(tmp_path / "a", provenance={"commit": None})
    with pytest.raises(TaskError, match="not a relative path"):
        write(tmp_path / "escape")
    assert list(tmp_path.iterdir()) == []


def test_a_set_is_made_by_one_process_at_a_time(tmp_path: Path):
    with (
        folder.claimed(tmp_path / "set"),
        pytest.raises(TaskError, match="another process is making tasks in"),
        folder.claimed(tmp_path / "set"),
    ):
        pass
    with folder.claimed(tmp_path / "set"):
        assert list((tmp_path / "set").iterdir()) == []


def test_sets_are_read_in_order(tiny_task: Task, tmp_path: Path):
    with pytest.raises(TaskError, match="no task set at"):
        tasks.load_set(tmp_path / "nowhere")
    with pytest.raises(TaskError, match="holds no task"):
        tasks.load_set(tmp_path)
    copy(tiny_task, tmp_path / "b")
    other = copy(tiny_task, tmp_path / "a")
    (other / "instruction.md").write_text(tiny_task.instruction + "Soon.\n")
    text = (other / "task.toml").read_text()
    (other / "task.toml").write_text(
        text.replace(tiny_task.id, reading.content_id(folder.peek(other), other))
    )
    (tmp_path / "rejections.jsonl").write_text("")
    assert [task.name for task in tasks.load_set(tmp_path)] == ["a", "b"]
    assert tasks.load_set(tmp_path / "b")[0].name == "b"
    copy(tiny_task, tmp_path / "c")
    with pytest.raises(TaskError, match="are the same task"):
        tasks.load_set(tmp_path)
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "a/task.toml").unlink()
    with pytest.raises(TaskError, match=r"lacks task\.toml"):
        tasks.load_set(tmp_path)


@pytest.mark.parametrize(
    ("path", "protected"),
    [
        ("tests/test_a.py", True),
        ("pkg/tests/data/x.json", True),
        ("pkg/test_a.py", True),
        ("pkg/a_test.py", True),
        ("conftest.py", True),
        ("pkg/conftest.py", True),
        ("setup.cfg", True),
        ("pkg/pytest.ini", True),
        ("pkg/x.pth", True),
        ("sitecustomize.py", True),
        ("pkg.egg-info/entry_points.txt", True),
        ("pkg/core.py", False),
        ("pkg/testing.py", False),
        ("pkg/latest.py", False),
        ("pkg/data/units.json", False),
    ],
)
def test_what_never_crosses(path: str, protected: bool):
    assert tasks.is_protected(path) == protected


# Environments


def test_an_environment_is_built_once_and_runs_nothing_of_the_host(tiny_task: Task):
    built = tasks.prepare(tiny_task.environment)
    assert tasks.prepare(tiny_task.environment) == built
    assert {p.name for p in (built / "bin").iterdir()} >= {"python", "pytest"}
    site = built / f"lib/python{tiny_task.environment.python}/site-packages"
    assert not list(site.glob("pip*"))
    assert not list(site.glob("tally*.py"))
    assert [p.name for p in (site / "tally-1.0.dist-info").iterdir()] == ["METADATA"]
    assert list((site / "_pytest/__pycache__").glob("config*.pyc")) or list((site / "_pytest").rglob("*.pyc"))
    script = "import importlib.metadata, tally; print(importlib.metadata.version('tally'), tally.__file__)"
    with open_sandbox(tasks.sandbox_spec(tiny_task)) as sandbox:
        assert sandbox.exec(["python", "-c", script]).stdout.decode() == "1.0 /workspace/tally/__init__.py\n"
        assert b"pytest" in sandbox.exec("pytest --version").stdout  # its first line says /env, not the cache


def test_packages_of_pythonpath_are_installed_nevertheless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They are not there when the tests run: an environment that was built without pytest grades nothing."""
    wheels = private_wheel(tmp_path / "wheels")
    shutil.unpack_archive(next(wheels.iterdir()), tmp_path / "elsewhere", "zip")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    venv.create(tmp_path / "env")
    options = ["--no-index", "--find-links", str(wheels)]
    environment._pip(tmp_path / "env" / "bin" / "python", options, ["acme-money==1.0"], "3.11")
    assert list((tmp_path / "env").rglob("acme_money.py"))


def test_the_key_covers_all_that_is_installed(tiny_task: Task):
    changes = {
        "python": "3.99",
        "requirements": ("pytest==9.0.0",),
        "packages": ("other",),
        "source_roots": ("src",),
        "distribution": "tally==2.0",
        "entry_points": "[console_scripts]\ntally = tally.words:split\n",
    }
    same = {"variables": ("TALLY=1",), "pytest_options": ("-m", "not slow")}
    assert {*changes, *same} == {field.name for field in dataclasses.fields(Environment)}
    alike = dataclasses.replace(tiny_task.environment, **same)
    assert environment._key(alike, Path("python")) == environment._key(tiny_task.environment, Path("python"))
    versions = [
        dataclasses.replace(tiny_task.environment, **{name: value}) for name, value in changes.items()
    ]
    keys = {environment._key(each, Path("python")) for each in [tiny_task.environment, *versions]}
    assert len(keys) == len(changes) + 1


def test_entry_points_of_the_distribution(tiny_task: Task):
    text = "[console_scripts]\ntally = tally.words:Main.run\n\n[pytest11]\ntally = tally.plugin\n\n[x.y]\nA = b\n"
    files = environment.own_files(dataclasses.replace(tiny_task.environment, entry_points=text))
    offered = next(text for path, text in files.items() if path.endswith("entry_points.txt"))
    assert offered == "[console_scripts]\ntally = tally.words:Main.run\n\n[x.y]\nA = b\n"
    assert files["bin/tally"].endswith("from tally.words import Main\n\nsys.exit(Main.run())\n")


BUILDS = """
import json, sys
from woodshed import tasks
from woodshed.records import Environment, from_json

print(tasks.prepare(from_json(Environment, json.loads(sys.argv[1]))))
"""


def test_threads_build_an_environment_once_and_a_second_process_does_no_harm(
    tiny_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WOODSHED_CACHE", str(tmp_path))
    said: list[str] = []

    def prepare(environment: Environment) -> Path:
        return tasks.prepare(environment, progress=lambda done, total, text: said.append(text))

    command = [sys.executable, "-c", BUILDS, json.dumps(to_json(tiny_task.environment))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other, ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(prepare, [tiny_task.environment] * 3)
        printed, _ = other.communicate(timeout=300)
    assert {*others, Path(printed.strip())} == {first}
    assert said.count("environment ready") <= 1  # none where the other process was faster
    assert list((tmp_path / "envs").iterdir()) == [first]
    with open_sandbox(SandboxSpec(lowers=(), environment=first)) as sandbox:
        assert sandbox.exec(["python", "-c", "import pytest"]).outcome == "ok"


KILLED = """
import json, os, signal, sys
from woodshed import tasks
from woodshed.records import Environment, from_json

def progress(done, total, text):
    if done:
        os.kill(os.getpid(), signal.SIGKILL)

tasks.prepare(from_json(Environment, json.loads(sys.argv[1])), progress=progress)
"""


def test_what_a_killed_builder_left_goes_with_the_next_one(
    tiny_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WOODSHED_CACHE", str(tmp_path))
    wanted = json.dumps(to_json(tiny_task.environment))
    done = subprocess.run([sys.executable, "-c", KILLED, wanted], check=False)
    (left,) = (tmp_path / "envs").iterdir()
    assert done.returncode == -signal.SIGKILL and list(left.glob("*/bin/python"))
    assert [tasks.prepare(tiny_task.environment)] == list((tmp_path / "envs").iterdir())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"requirements": ()}, "no pytest"),
        ({"requirements": ("pytest==6.2.5",)}, "pytest==6.2.5"),
        ({"requirements": ("pytest>=8",)}, "'pytest>=8' is not an exact pin"),
        ({"requirements": ("pytest @ https://example.org/pytest.tar.gz",)}, "points to a URL"),
        ({"requirements": ("--index-url=https://example.org", "pytest==9.0.0")}, "cannot be read"),
        ({"python": "3.2"}, "no python3.2 on PATH, and none of uv or pyenv"),
    ],
)
def test_environments_that_cannot_be(tiny_task: Task, changes: dict, said: str):
    with pytest.raises(TaskError) as caught:
        tasks.prepare(dataclasses.replace(tiny_task.environment, **changes))
    assert said in str(caught.value)


def test_incomplete_pins_and_second_copies_are_refused(
    tiny_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WOODSHED_CACHE", str(tmp_path))
    pins = tuple(pin for pin in tiny_task.environment.requirements if not pin.startswith("pluggy"))
    with pytest.raises(TaskError, match="they also need pluggy=="):
        tasks.prepare(dataclasses.replace(tiny_task.environment, requirements=pins))
    with pytest.raises(TaskError, match="second copy of 'iniconfig'"):
        tasks.prepare(dataclasses.replace(tiny_task.environment, packages=("iniconfig",)))
    assert list((tmp_path / "envs").iterdir()) == []


@pytest.fixture
def source_only_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that holds one sdist, whose setup.py tells when it runs."""
    project = tmp_path / "sly-1.0"
    project.mkdir()
    (project / "setup.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nimport setuptools; setuptools.setup(name='sly')"
    )
    (tmp_path / "index").mkdir()
    with tarfile.open(tmp_path / "index/sly-1.0.tar.gz", "w:gz") as archive:
        archive.add(project, "sly-1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path


def test_source_distributions_are_never_built(source_only_index: Path):
    with pytest.raises(TaskError) as caught:
        tasks.resolve(["sly==1.0"])
    assert "'sly==1.0' has no wheel for Python" in str(caught.value)
    assert "pip said:" in str(caught.value)
    assert not (source_only_index / "ran").exists()


def test_resolving_pins_everything(tiny_task: Task):
    known = [pin for pin in tiny_task.environment.requirements if pin.startswith("pytest")]
    pins = tasks.resolve(known)
    assert set(known) < set(pins)
    assert list(pins) == sorted(pins)
    assert any(pin.startswith("pluggy==") for pin in pins)


def test_expected_tests_are_the_ones_of_the_record(tiny_task: Task):
    expected = json.loads((tiny_task.folder / "tests/expected.json").read_text("utf-8"))
    assert tuple(expected["fail_to_pass"]) == tiny_task.fail_to_pass


MARKERS = {
    "native": None,
    "pkgutil": "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n",
    "pkg_resources": "__import__('pkg_resources').declare_namespace(__name__)\n",
}


@pytest.mark.parametrize("release", ["6.0", "5.0"], ids=["native", "with an nspkg.pth"])
def test_a_namespace_is_shared_however_either_side_declares_it(release: str, tmp_path: Path):
    pins = tasks.resolve([f"zope.event=={release}", "setuptools<82"])
    made = Environment("{}.{}".format(*sys.version_info), pins, packages=("zope.odd", "zope.deep.er"))
    built = tasks.prepare(made)
    for style, marker in MARKERS.items():
        for part in ("odd", "deep/er"):
            (tmp_path / style / "zope" / part).mkdir(parents=True)
            (tmp_path / style / "zope" / part / "__init__.py").write_text("")
        for place in ("zope", "zope/deep"):
            if marker:
                (tmp_path / style / place / "__init__.py").write_text(marker)
        spec = SandboxSpec((tmp_path / style,), built, env={"PYTHONPATH": "/workspace"})
        with open_sandbox(spec) as sandbox:
            for order in ("zope.odd, zope.event, zope.deep.er", "zope.event, zope.deep.er, zope.odd"):
                result = sandbox.exec(["python", "-W", "ignore", "-c", f"import {order}"], timeout_s=60)
                assert result.outcome == "ok", (style, order, result.stderr)
