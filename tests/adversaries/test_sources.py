"""Sources and task folders made to write, read, delete or run something on the host."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from woodshed import synthesis, tasks
from woodshed.pysource import syntax
from woodshed.records import Task, TaskError
from woodshed.synthesis import builds, project, sources
from woodshed.synthesis.leaks import fingerprints
from woodshed.synthesis.measuring import read_kept
from woodshed.synthesis.repository_context import LONGEST_NAME, folder_name
from woodshed.synthesis.stats import rejected
from woodshed.tasks import export, folder
from woodshed.tasks.folder import reading

BACKEND = """
import json, pathlib, zipfile

def build_wheel(out, config_settings=None, metadata_directory=None):
    plan = json.loads(pathlib.Path("plan.json").read_text())
    with zipfile.ZipFile(pathlib.Path(out, "w.whl"), "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in plan["files"].items():
            bundle.writestr(name, text * plan.get("times", 1))
    return plan.get("answer", "w.whl")
"""
METADATA = "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n"


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A folder of the host where nothing may appear and nothing may go."""
    place = tmp_path / "canary"
    place.mkdir()
    (place / "kept").write_text("kept")
    yield place
    assert [p.name for p in place.iterdir()] == ["kept"], "something of the source reached the host"


def up_to(place: Path) -> str:
    return "../" * 30 + str(place).lstrip("/")


def repository(root: Path, more: dict[str, str], **plan: object) -> sources.Repository:
    """A repository whose build makes a wheel of these files."""
    (root / "evil").mkdir(parents=True)
    (root / "evil/__init__.py").write_text("def f():\n    return 1\n")
    system = 'requires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (root / "pyproject.toml").write_text(f"[build-system]\n{system}")
    (root / "backend.py").write_text(BACKEND)
    wheel = {"evil/__init__.py": "", "evil-1.0.dist-info/METADATA": METADATA, **more}
    (root / "plan.json").write_text(json.dumps({"files": wheel, **plan}))
    return sources.fetch(str(root), root.parent / "copy")


def test_a_build_that_means_well_is_read(tmp_path: Path):
    found = project.read(repository(tmp_path / "evil", {"evil/made.py": "x = 1"}))
    assert found.distribution == "evil==1.0" and found.generated == ("evil/made.py",)


@pytest.mark.parametrize("start", ["evil/", "/", "evil/x/./"])
def test_a_wheel_writes_nothing_outside_of_the_tree(tmp_path: Path, canary: Path, start: str):
    name = str(canary / "written") if start == "/" else start + up_to(canary / "written")
    with pytest.raises(TaskError, match="no path below its root"):
        project.read(repository(tmp_path / "evil", {name: "x"}))


@pytest.mark.parametrize(
    ("files", "plan", "said"),
    [
        ({"evil-1.0.dist-info/METADATA": METADATA.replace("1.0", "1/../../x")}, {}, "Invalid version"),
        ({"evil-1.0.dist-info/METADATA": METADATA.replace("evil", "../evil")}, {}, "Name = "),
        ({"evil-1.0.dist-info/METADATA": "Version: 1.0\n"}, {}, "Name = None"),
        ({"evil-1.0.dist-info/METADATA": f"{METADATA}Requires-Python: banana\n"}, {}, "Invalid specifier"),
        ({}, {"answer": "../../etc/passwd"}, "named its wheel"),
        ({}, {"answer": {"a": 1}}, "named its wheel"),
        ({}, {"answer": "gone.whl"}, "left no wheel gone.whl"),
        ({}, {"answer": "x.txt", "files": {}}, "left no wheel x.txt"),
        ({}, {"files": {"evil/__init__.py": ""}}, "without METADATA"),
        ({"evil/big.txt": "x"}, {"times": 300_000}, "at most"),
    ],
)
def test_what_a_build_answers_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files, plan, said):
    monkeypatch.setattr(builds, "WHEEL_BYTES", 200_000)
    with pytest.raises(TaskError, match=said):
        project.read(repository(tmp_path / "evil", files, **plan))


@pytest.mark.parametrize(
    "table", ["build-system = 3", "[build-system]\nrequires = [1]", "[build-system]\nbuild-backend = []"]
)
def test_a_build_system_of_other_types_is_refused(tmp_path: Path, table: str):
    made = repository(tmp_path / "evil", {})
    (made.tree / "pyproject.toml").write_text(table)
    with pytest.raises(TaskError, match=r"\[build-system\] of its pyproject.toml"):
        project.read(made)


@pytest.mark.parametrize(
    "changes",
    [
        {"entry_points": "[console_scripts]\n{up} = tally:main\n"},
        {"entry_points": "garbage"},
        {"distribution": "tally==1/{up}"},
        {"distribution": "../{up}==1"},
        {"python": "3/{up}"},
    ],
)
def test_an_environment_writes_nothing_outside_of_itself(
    tiny_task: Task, canary: Path, changes: dict[str, str]
):
    there = {key: value.replace("{up}", up_to(canary / "written")) for key, value in changes.items()}
    hostile = replace(tiny_task.environment, **there)
    with pytest.raises(TaskError):
        tasks.prepare(hostile)
    with pytest.raises(TaskError):
        written(replace(tiny_task, id="", environment=hostile), canary.parent / "task")


def written(task: Task, into: Path, gold: dict[str, bytes | None] | None = None) -> Task:
    solution = {path: (text or "").encode() for path, text in folder.gold_patch(task).files.items()}
    workspace = task.folder / "environment" / "workspace"
    tests = folder.protected_files(task)
    return folder.write(task, into, workspace=workspace, tests=tests, gold=solution if gold is None else gold)


def test_a_solution_deletes_nothing_outside_of_the_workspace(tiny_task: Task, tmp_path: Path, canary: Path):
    made = written(replace(tiny_task, id="", name="evil"), tmp_path / "evil")
    (made.folder / "solution" / "deletes").write_text(up_to(canary / "kept"))
    signed = reading.content_id(made, made.folder)
    toml = made.folder / "task.toml"
    toml.write_text(toml.read_text().replace(made.id, signed))
    with pytest.raises(TaskError, match="no path inside the workspace"):
        tasks.load(made.folder)


def git(place: Path, *arguments: str) -> str:
    who = {f"GIT_{w}_{x}": "a@b" for w in ("AUTHOR", "COMMITTER") for x in ("NAME", "EMAIL")}
    command = ["git", "-C", str(place), "-c", "protocol.file.allow=always", *arguments]
    done = subprocess.run(command, env=os.environ | who, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def committed(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    git(root, "tag", "v2.1")
    return root


def test_a_folders_git_configuration_runs_nothing(tmp_path: Path, canary: Path):
    root = committed(tmp_path / "evil", {"a.py": "x = 1"})
    inner = committed(tmp_path / "inner", {"b.py": "y = 1"})
    git(root, "submodule", "add", "-q", str(inner), "sub")
    command = f"touch {canary}/ran; false"
    for place in (root, root / "sub"):
        for key, value in (
            ("core.fsmonitor", command),
            ("core.pager", command),
            ("alias.describe", f"!{command}"),
        ):
            git(place, "config", key, value)
    found = sources.fetch(str(root), tmp_path / "copy")
    assert found.version == "2.1" and (found.tree / "a.py").is_file() and (found.tree / "sub/b.py").is_file()


def test_what_a_link_took_the_place_of_is_left_out(tmp_path: Path):
    root = committed(tmp_path / "evil", {"a.py": "x = 1", "data/key.txt": "mine", "b.txt": "mine"})
    (tmp_path / "host").mkdir()
    (tmp_path / "host/key.txt").write_text("secret")
    (root / "data/key.txt").unlink()
    (root / "data").rmdir()
    (root / "data").symlink_to(tmp_path / "host")
    (root / "b.txt").unlink()
    (root / "b.txt").symlink_to(tmp_path / "host/key.txt")
    found = sources.fetch(str(root), tmp_path / "copy")
    assert [path.name for path in found.tree.rglob("*")] == ["a.py"]


def test_a_folder_whose_git_cannot_be_read_is_refused_with_the_way_out(tmp_path: Path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work/.git").write_text("gitdir: /nowhere")
    with pytest.raises(TaskError, match=r"a copy of the folder without \.git"):
        sources.fetch(str(tmp_path / "work"), tmp_path / "copy")


def test_git_is_not_led_astray_by_the_variables_of_a_hook(
    tiny_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    victim = committed(tmp_path / "victim", {"a.py": "x = 1"})
    before = git(victim, "rev-parse", "HEAD")
    other = committed(tmp_path / "other", {"b.py": "y = 1"})
    monkeypatch.setenv("GIT_DIR", str(victim / ".git"))
    export.instance(tiny_task, "swebench")
    found = sources.fetch(f"git+file://{other}@HEAD", tmp_path / "copy")
    monkeypatch.delenv("GIT_DIR")
    assert git(victim, "rev-parse", "HEAD") == before and git(victim, "status", "--porcelain") == ""
    assert [path.name for path in found.tree.iterdir()] == ["b.py"]


def test_passwords_of_an_address_are_kept_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    origin = committed(tmp_path / "origin", {"a.py": "x = 1"})
    address = "https://me:s3cr3t@git.invalid/origin"
    config = tmp_path / "config"
    config.write_text(f'[url "file://{origin}"]\n    insteadOf = {address}\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    found = sources.fetch(f"git+{address}@HEAD", tmp_path / "copy")
    assert found.source.startswith("git+https://git.invalid/origin@")
    said: list[str] = []
    only = synthesis.SynthesisSettings(operators=("revert", "stub"))
    with pytest.raises(TaskError):  # it has no tests
        synthesis.make(
            [f"git+{address}@HEAD"], tmp_path / "out", only, lambda done, total, text: said.append(text)
        )
    assert said and not any("s3cr3t" in text for text in said)
    for wrong in (
        f"git+{address}@gone",
        "git+https://me:s3cr3t@localhost:1/x@HEAD",
        "git+ssh://me:s3cr3t@x/y",
    ):
        with pytest.raises(TaskError) as caught:
            sources.fetch(wrong, tmp_path / "wrong")
        assert "s3cr3t" not in str(caught.value)


def test_folders_of_tasks_are_called_what_a_folder_may_be():
    assert folder_name("toolz-stub-curry.bind") == "toolz-stub-curry.bind"
    odd = ["caf\u00e9", "a..b", "x" * 300, "x" * 299 + "y", "a/b", "a b"]
    names = [folder_name(text) for text in odd]
    assert len(set(names)) == len(odd) and all(len(name) <= LONGEST_NAME for name in names)
    assert all(name.isascii() and ".." not in name and "/" not in name and " " not in name for name in names)
    assert [folder_name(name) for name in names] == names


def test_deep_code_is_printed_and_links_in_a_circle_are_dropped(tmp_path: Path):
    deep = "if a == 0:\n    pass\n" + "".join(f"elif a == {n}:\n    pass\n" for n in range(1, 1500))
    assert fingerprints.shape(syntax.parse(deep).body)[1] > 1500
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("x = 1")
    (tmp_path / "src/loop").symlink_to("loop")
    assert [p.name for p in sources.fetch(str(tmp_path / "src"), tmp_path / "copy").tree.iterdir()] == [
        "a.py"
    ]


@pytest.mark.parametrize(
    "text", ["", "{torn", "[]", '{"contents": {}}', '{"contents": {"../x": ""}, "map": {}, "copies": []}']
)
def test_a_damaged_measurement_is_made_again(tmp_path: Path, text: str):
    kept = tmp_path / "kept.json"
    assert read_kept(kept) == {}
    kept.write_text(text)
    assert read_kept(kept) == {}
    kept.write_text('{"contents": {"a/x.py": ""}, "map": {"unmapped": [], "timeout_s": 1}, "copies": []}')
    assert read_kept(kept)


def test_a_damaged_log_of_rejections_is_read_as_far_as_it_goes(tmp_path: Path):
    log = tmp_path / "rejections.jsonl"
    assert list(rejected(log)) == []
    good = {"task": "a", "reason": "leak", "detail": ""}
    log.write_bytes(b"\xff\n[]\n{}\n" + json.dumps(good).encode() + textwrap.dedent("\n{torn").encode())
    assert list(rejected(log)) == [good]
