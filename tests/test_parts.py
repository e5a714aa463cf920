"""Parts by import path: found in the working folder, checked before the work, never imported by reading settings."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import pytest

from woodshed import parts, settings
from woodshed.records import RecipeError
from woodshed.settings import Settings


def length(task: str, rollout: str, *, weight: float = 1.0) -> int:
    return len(rollout)


class Speaker(Protocol):
    @property
    def name(self) -> str: ...

    def say(self, text: str) -> str: ...


COUNT = parts.Part("count", {"length": length})
SPEAKER: parts.Part[Speaker] = parts.Part("speaker", {}, Speaker)


class Section(Settings):
    terms: dict[Annotated[str, COUNT], float] = {}  # noqa: RUF012
    speakers: tuple[Annotated[str, SPEAKER], ...] = ()


class Outer(Settings):
    count: Annotated[str, COUNT] = "length"
    section: Section = Section()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the working folder, outside of the package."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
            def words(task, rollout, *, weight=1.0):
                return len(rollout.split())

            def careless(rollout):
                return 0

            class Loud:
                name = "loud"

                def say(self, text):
                    return text.upper()

            class Mute:
                name = "mute"

            LOUD, MUTE, NUMBER = Loud(), Mute(), 3
        """)
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield name
    sys.path[:] = before
    sys.modules.pop(name, None)


def test_a_name_of_the_table_and_one_of_the_working_folder(module: str):
    assert COUNT.resolve("length") is length
    assert COUNT.resolve(f"{module}:words")("", "three short words", weight=2.0) == 3
    assert SPEAKER.resolve(f"{module}:LOUD").say("hey") == "HEY"


def test_reading_settings_imports_nothing_and_checking_them_does(module: str):
    chosen = settings.validate(
        Outer,
        {"count": f"{module}:words", "section": {"speakers": [f"{module}:LOUD"], "terms": {"length": 1}}},
    )
    assert module not in sys.modules
    parts.check(chosen)
    assert module in sys.modules


@pytest.mark.parametrize("field", ["count", "section.speakers", "section.terms"])
def test_every_named_part_of_nested_settings_is_checked(module: str, field: str):
    value = {"count": '"{}:no"', "section.speakers": '["{}:no"]', "section.terms": '{{"{}:no" = 1.0}}'}[field]
    chosen = settings.read(Outer, None, [f"{field}={value.format(module)}"])
    with pytest.raises(RecipeError, match="has no 'no'"):
        parts.check(chosen)


@pytest.mark.parametrize("name", ["lenght", "a b:c", "package.module:", ":name", "../own:words", "own:a.b"])
def test_a_name_of_no_form_is_refused_when_settings_are_read(name: str):
    with pytest.raises(RecipeError, match=r"no count .*package\.module:name"):
        settings.validate(Outer, {"count": name})


@pytest.mark.parametrize(
    ("part", "name", "message"),
    [
        (COUNT, "{}:word", "has no 'word'; it has words"),
        (COUNT, "{}x:words", "there is no module '{}x' in .* start in the folder"),
        (COUNT, "{}:NUMBER", "is 3, which cannot be called; it must take .task, rollout, ., weight."),
        (COUNT, "{}:careless", "takes .rollout., and it is called with .task, rollout"),
        (SPEAKER, "{}:MUTE", "has no 'say', which Speaker asks for"),
        (SPEAKER, "{}:Loud", "is a class; name an object of it"),
    ],
)
def test_mistakes_name_the_value_and_the_way_out(module: str, part: parts.Part, name: str, message: str):
    with pytest.raises(RecipeError, match=message.replace("{}", module)) as raised:
        part.resolve(name.format(module))
    assert name.format(module) in str(raised.value)


@pytest.mark.parametrize("text", ["1 / 0", "raise SystemExit(3)", "import no_such_thing", "def"])
def test_a_module_that_raises_is_quoted_with_its_line(module: str, text: str, tmp_path: Path):
    (tmp_path / f"{module}.py").write_text(f"x = 1\n{text}\n")
    with pytest.raises(RecipeError, match=rf"{module}:words' cannot be imported: .*{module}.py, line 2"):
        COUNT.resolve(f"{module}:words")


def test_a_module_of_the_working_folder_hides_no_installed_one(tmp_path: Path, module: str):
    (tmp_path / "tomli_w.py").write_text("raise AssertionError('shadowed')")
    sys.modules.pop("tomli_w")
    assert COUNT.resolve(f"{module}:words")
    import tomli_w

    assert "dumps" in vars(tomli_w)


@pytest.mark.parametrize(
    ("file", "name", "message"),
    [
        ("runs/theirs/evil.py", "runs.theirs.evil:words", "lies in the run folder .*theirs"),
        ("runs/evil.py", "runs.evil:words", "runs is a folder and no package"),
        ("theirs/evil.py", "theirs.evil:words", "lies in the run folder .*theirs"),
        ("evil.py", "evil:words", "lies in the run folder"),
    ],
)
def test_nothing_is_imported_from_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str, message: str
):
    """A run folder of somebody else may bring code beside its recipe, below the working folder or as that."""
    evil = tmp_path / file
    evil.parent.mkdir(parents=True, exist_ok=True)
    evil.write_text("raise AssertionError('imported')\n")
    if evil.parent.name == "theirs" and file.startswith("theirs"):
        (evil.parent / "__init__.py").write_text("raise AssertionError('imported')\n")
    for written in ("manifest.json", "recipe.toml") if evil.parent.name != "runs" else ():
        (evil.parent / written).write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RecipeError, match=message):
        COUNT.resolve(name)
    assert not [module for module in sys.modules if module.endswith("evil")]


def test_python_m_puts_the_working_folder_last(tmp_path: Path):
    """Python puts it first, where a file in it would hide an installed package."""
    (tmp_path / "typer.py").write_text("raise AssertionError('shadowed')")
    path = [str(Path(parts.__file__).parents[1]), *sys.path]
    done = subprocess.run(
        [sys.executable, "-m", "woodshed", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("woodshed "), done.stderr


def test_what_a_part_raises_at_work_names_the_part_and_the_line(module: str, tmp_path: Path):
    (tmp_path / f"{module}.py").write_text(
        "def words(task, rollout, *, weight=1.0):\n    return 1 / length(rollout)\n\n"
        "def length(text):\n    return text['n']\n"
    )
    count = COUNT.resolve(f"{module}:words")
    message = rf"count '{module}:words' failed: TypeError: .*{module}.py, line 5"
    with pytest.raises(RecipeError, match=message), parts.blamed():
        count("", "three")
    with pytest.raises(ZeroDivisionError), parts.blamed():  # a fault of ours is no fault of theirs
        raise ZeroDivisionError
    assert parts.own(Section(terms={"length": 1.0, f"{module}:words": 2.0})) == (f"{module}:words",)
