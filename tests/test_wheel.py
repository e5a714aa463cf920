"""The wheel that people install: everything of the package is in it, and its commands start without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from woodshed.runs.machine import git_environment

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builders = pytest.importorskip(
        "hatchling.builders.wheel", reason="scripts/environment installs hatchling"
    )
    out = tmp_path_factory.mktemp("dist")
    (built,) = builders.WheelBuilder(str(ROOT)).build(directory=str(out), versions=["standard"])
    return Path(built)


def listed(*arguments: str) -> set[str]:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=git_environment(),
    )
    return set(done.stdout.splitlines())


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as bundle:
        held = {name for name in bundle.namelist() if ".dist-info/" not in name}
    known = listed("woodshed") | listed("--others", "--exclude-standard", "woodshed")
    assert held == {name for name in known if (ROOT / name).is_file()}
    assert {Path(name).suffix for name in held} > {".py", ".j2", ".toml", ".js", ".css"}, (
        "data of the package"
    )


def test_commands_of_the_wheel_start(wheel: Path, tiny_model_dir: Path, tmp_path: Path):
    """Imported from the wheel itself, in a folder without recipes or scripts."""
    unpacked = tmp_path / "site"
    with zipfile.ZipFile(wheel) as bundle:
        bundle.extractall(unpacked)
    for name, text in {
        "shop/shop/__init__.py": "def net(price):\n    return price / 2\n",
        "shop/tests/test_shop.py": "from shop import net\ndef test_net():\n    assert net(4) == 2\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def type_in(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "woodshed", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(unpacked)},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "init" in type_in("--help")
    said = type_in("init", "shop", "--model", str(tiny_model_dir))
    assert "recipe: shop.toml" in said and "next: woodshed train shop.toml" in said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_installs_into_a_fresh_environment(wheel: Path, tmp_path: Path):
    """Without PyTorch: the commands start, the machine is checked, and what needs PyTorch says how to get it."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    pins = ROOT / "requirements" / "constraints.txt"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", pins, wheel]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        install, check=True, cwd=tmp_path, env=environment
    )  # pip takes what is on the path for installed

    def type_in(*words: str) -> subprocess.CompletedProcess[str]:
        command = [python.with_name("woodshed"), *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )

    assert type_in("--version").stdout.startswith("woodshed ")
    assert type_in("doctor").returncode == 0
    asked = type_in("settings", "feedback.teacher")
    assert asked.returncode == 0 or "pip install 'woodshed[train]'" in asked.stderr
