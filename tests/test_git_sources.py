"""Sources as people name them: addresses of forges, ssh, one project of many, private packages."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from woodshed.records import TaskError
from woodshed.sandbox import BUBBLEWRAP
from woodshed.synthesis import git_sources, pins, project, sources
from woodshed.synthesis.git_sources import GitSource
from woodshed.tasks.interpreters import OURS


@pytest.mark.parametrize(
    ("source", "address", "revision", "subdirectory", "name"),
    [
        ("https://github.com/o/n", "https://github.com/o/n", "HEAD", "", "n"),
        ("https://github.com/o/n.git@v1", "https://github.com/o/n.git", "v1", "", "n"),
        ("https://gl.com/a/b/n/-/tree/main/x/core", "https://gl.com/a/b/n", "main", "x/core", "core"),
        ("https://github.com/o/n/tree/dev", "https://github.com/o/n", "dev", "", "n"),
        ("https://codeberg.org/o/n/src/branch/main/s", "https://codeberg.org/o/n", "main", "s", "s"),
        ("https://u:p@h/o/n@r#egg=n&subdirectory=a/b/", "https://u:p@h/o/n", "r", "a/b", "b"),
        ("git+https://h/o/n@r", "https://h/o/n", "r", "", "n"),
        ("git@h.com:o/n.git", "git@h.com:o/n.git", "HEAD", "", "n"),
        ("git@h:o/n.git@v1#subdirectory=x", "git@h:o/n.git", "v1", "x", "x"),
        ("ssh://git@h:22/o/n", "ssh://git@h:22/o/n", "HEAD", "", "n"),
        ("git+ssh://git@h/o/n@x", "ssh://git@h/o/n", "x", "", "n"),
    ],
)
def test_addresses_as_people_copy_them(
    source: str, address: str, revision: str, subdirectory: str, name: str
):
    found = git_sources.read(source)
    assert found == GitSource(address, revision, subdirectory)
    assert found is not None and found.name == name


@pytest.mark.parametrize("source", ["./x", "/x", "x", "-oProxyCommand=x@h:x", "a@b:/x", ""])
def test_a_folder_is_no_address(source: str):
    assert git_sources.read(source) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "git+http://x/y",
            "cannot be read; write https://HOST/OWNER/NAME@REV, git@HOST:OWNER/NAME@REV or git",
        ),
        ("http://u:p@x/y", "^'http://x/y' cannot be read"),
        ("https://h/o/n/archive/main.tar.gz", "is an archive; unpack it and give the folder, or write pypi:"),
    ],
)
def test_what_git_is_not_asked_for(source: str, message: str):
    with pytest.raises(TaskError, match=message):
        git_sources.read(source)


def test_secrets_are_not_said():
    text = "https://a:b@h/x ssh://git:pw@h/x ssh://git@h/x https://token@h"
    assert git_sources.without_secrets(text) == "https://h/x ssh://git@h/x ssh://git@h/x https://h"


@pytest.fixture(scope="module")
def mono(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of two projects, and a root that only holds settings of tools."""
    root = tmp_path_factory.mktemp("git") / "mono"
    files = {
        "pyproject.toml": "[tool.ruff]\nline-length = 100\n",
        "packages/core/pyproject.toml": "[project]\nname = 'acme-core'\nversion = '1'\n",
        "packages/core/acme_core.py": "ONE = 1\n",
        "packages/web/setup.py": "from setuptools import setup\nsetup()\n",
        "tests/fixture/pyproject.toml": "[project]\nname = 'no-project'\n",
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main"]
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["commit", "-qm", "one"],
        ["tag", "v2.0"],
        ["branch", "dev"],
    ):
        subprocess.run(["git", *who, "-C", str(root), *command], check=True)
    return root


def test_a_root_of_many_projects_names_them(mono: Path, tmp_path: Path):
    with pytest.raises(TaskError) as raised:
        project.read(sources.fetch(str(mono), tmp_path / "tree"))
    said = str(raised.value)
    assert "It holds 2 projects: packages/core (acme-core), packages/web." in said
    assert "(./packages/core from there), or a git source with #subdirectory=packages/core behind it" in said


def test_one_project_of_many_is_fetched_alone(mono: Path, tmp_path: Path):
    found = sources.fetch(f"git+file://{mono}@dev#subdirectory=packages/core", tmp_path / "tree")
    assert (found.name, found.version) == ("core", "2.0")
    assert sorted(path.name for path in found.tree.iterdir()) == ["acme_core.py", "pyproject.toml"]
    assert found.source.endswith("#subdirectory=packages/core") and str(mono) in found.source
    assert {path.name for path in tmp_path.iterdir()} == {"tree", "tree.whole"}
    with pytest.raises(TaskError, match=r"no folder '\.\./x' in HEAD"):
        sources.fetch(f"git+file://{mono}#subdirectory=../x", tmp_path / "tree")


def test_ssh_is_asked_without_a_prompt(mono: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for ssh runs what the other side would run, here."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nfor last; do :; done\neval "cd / && $last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("GIT_SSH_COMMAND", raising=False)
    source = f"git@forge.example:{str(mono)[1:]}@v2.0"
    found = sources.fetch(source, tmp_path / "tree")
    assert found.name == "mono" and found.source.startswith(f"git+ssh://git@forge.example/{str(mono)[1:]}@")
    asked = (tmp_path / "asked").read_text().splitlines()[-1]
    assert "BatchMode=yes" in asked and "git@forge.example" in asked
    ssh.write_text("#!/bin/sh\necho 'git@forge.example: Permission denied (publickey).' >&2\nexit 255\n")
    with pytest.raises(TaskError, match=r"cannot be cloned.*give its ssh address"):
        sources.fetch(source, tmp_path / "tree")


def test_what_pip_finds_only_as_source_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The newest that fits, in a sandbox; what it runs there leaves nothing here."""
    monkeypatch.setenv("WOODSHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", f"{os.environ.get('PIP_FIND_LINKS', '')} {tmp_path}")
    marker = Path("/tmp/woodshed-built-on-the-host")
    for version in ("1.0", "1.1", "2.0"):
        setup = f"import pathlib\nfrom setuptools import setup\npathlib.Path('{marker}').write_text('')\n"
        setup += f"setup(name='acme-source', version='{version}', py_modules=['acme_source'])\n"
        with tarfile.open(tmp_path / f"acme_source-{version}.tar.gz", "w:gz") as archive:
            for name, text in {"setup.py": setup, "acme_source.py": "X = 1\n"}.items():
                member = tarfile.TarInfo(f"acme_source-{version}/{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    index = pins._Index(OURS, BUBBLEWRAP, {}, "")
    found, given_up = index.pins(["acme-source<2"], ["acme-nowhere"], [])
    assert "acme-source==1.1" in found
    (reason,) = given_up
    assert reason.startswith("acme-nowhere: no package index has a wheel of it for this Python, and ")
    assert [path.name for path in (tmp_path / "cache/wheels").iterdir()] == [
        "acme_source-1.1-py3-none-any.whl"
    ]
    assert not marker.exists()
