"""Strict settings: files, overrides, suggestions, and TOML that reads back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, field_validator

from woodshed import settings
from woodshed.records import RecipeError
from woodshed.settings import FolderName, FolderPath, Settings


class Loop(Settings):
    """A loop."""

    steps: int = 6
    """Optimizer steps."""
    rate: float = Field(default=1e-3, gt=0)
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decays."""


class Whole(Settings):
    """A recipe."""

    name: str = "first"
    loop: Loop = Loop()
    teacher: Literal["frozen", "live"] = "frozen"
    folders: tuple[Path, ...] = ()
    timeout_s: float | None = None


def read(tmp_path: Path, text: str, *overrides: str) -> Whole:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return settings.read(Whole, path, overrides)


def test_a_file_and_overrides(tmp_path: Path):
    read_back = read(
        tmp_path,
        'name = "a"\n[loop]\nsteps = 2\n',
        "loop.steps=4",
        "loop.betas=[0.8, 0.9]",
        "teacher=live",
        "timeout_s=3",
        'folders=["tasks/a b"]',
    )
    assert read_back == Whole(
        name="a",
        loop=Loop(steps=4, betas=(0.8, 0.9)),
        teacher="live",
        timeout_s=3.0,
        folders=(Path("tasks/a b"),),
    )


@pytest.mark.parametrize(
    "name", ["plain", 'qu"ote\\ \n\t\x7f\x00', "ünï 日本 \U0001f3b7", "[loop]\nsteps = 9"]
)
def test_toml_reads_back(tmp_path: Path, name: str):
    chosen = Whole(name=name, loop=Loop(rate=1e-07), folders=(Path("a"), Path("b c")), timeout_s=2.5)
    assert read(tmp_path, chosen.to_toml()) == chosen
    assert read(tmp_path, Whole().to_toml()) == Whole()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loop.stesp=4", r"unknown setting 'loop\.stesp'; did you mean 'loop\.steps'\?"),
        ("xyz.rate=4", r"unknown setting 'xyz'; did you mean 'loop\.rate'\?"),
        ("lop.steps=4", r"unknown setting 'lop'; did you mean 'loop'\?"),
        ("rate=4", r"unknown setting 'rate'; did you mean 'loop\.rate'\?"),
        ("loop.teacher=live", r"unknown setting 'loop\.teacher'; did you mean 'teacher'\?"),
        ("zzz=4", r"unknown setting 'zzz'; known here: name, loop, teacher"),
        ("loop.steps=many", r"loop\.steps = 'many': give a whole number of steps$"),
        ("loop.rate=0", r"loop\.rate = 0: give a number, above 0"),
        ("loop.rate=nan", r"loop\.rate = nan: give a number, above 0"),
        ("loop.betas=[0.9]", r"loop\.betas\.1"),
        ("teacher=alive", r"teacher = 'alive': give frozen or live"),
        ("loop", r"override 'loop' is not of the form section\.key=value"),
        ("=3", r"override '=3' is not of the form"),
        ("name.first=3", r"override 'name\.first=3': 'name' is a value"),
    ],
)
def test_mistakes_name_the_value_and_the_way_out(tmp_path: Path, override: str, message: str):
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, 'name = "a"\n', override)


def test_every_mistake_is_listed(tmp_path: Path):
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, "nam = 1\n[loop]\nsteps = 'x'\n")
    assert str(caught.value).startswith(str(tmp_path / "recipe.toml"))
    assert "did you mean 'name'" in str(caught.value) and "loop.steps" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "quickstart.toml").write_text("")
    with pytest.raises(RecipeError, match=r"no recipe at .*quickstrat\.toml; .* holds quickstart\.toml"):
        settings.read(Whole, tmp_path / "quickstrat.toml")
    with pytest.raises(RecipeError, match="is not valid TOML"):
        read(tmp_path, "name = ")
    with pytest.raises(RecipeError, match="cannot be read: it is a folder"):
        settings.read(Whole, tmp_path)


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Whole().name = "b"  # type: ignore[misc]


def test_no_number_of_a_recipe_may_be_negative():
    from woodshed.evals.suite import SuiteSettings
    from woodshed.stages.recipe import Recipe
    from woodshed.synthesis import SynthesisSettings

    for kind, more in (
        (Recipe, ["name=x"]),
        (SuiteSettings, ["name=x", "tasks=['t']"]),
        (SynthesisSettings, []),
    ):
        numbers = (int, float, int | None, float | None)
        names = [name for name, field in settings.leaves(kind) if field.annotation in numbers]
        assert len(names) > 5
        for name in names:
            with pytest.raises(RecipeError, match=f"{name} = -1"):
                settings.read(kind, None, [*more, f"{name}=-1"])


def test_overrides_that_are_too_deep_or_too_long_and_files_with_a_mark(tmp_path: Path):
    for value, why in (
        ("[" * 3000 + "]" * 3000, "levels deep"),
        ("9" * 5000, "128 bits"),
        ("9" * 100, "128 bits"),
    ):
        with pytest.raises(
            RecipeError, match=rf"^override loop.steps=\S+ cannot be read: .*{why}$"
        ) as caught:
            read(tmp_path, "", f"loop.steps={value}")
        assert len(str(caught.value)) < 300
    assert read(tmp_path, "\ufeffname = 'marked'\n").name == "marked"


def test_names_and_folders_of_runs_and_whole_sections_are_plain_messages(tmp_path: Path):
    class Run(Settings):
        """A run."""

        name: FolderName = "one"
        runs: FolderPath = Path("runs")
        whole: Whole = Whole()

        @field_validator("whole")
        @classmethod
        def _fits(cls, whole: Whole) -> Whole:
            raise ValueError("it does not fit")

    for name in ("../../x", "..", ".", "", "a/b"):
        with pytest.raises(RecipeError, match=f"^settings: name = '{name}': name one folder"):
            settings.read(Run, None, [f"name='{name}'"])
    with pytest.raises(RecipeError, match=r"^settings: runs = '': name a folder"):
        settings.read(Run, None, ["runs="])
    with pytest.raises(RecipeError, match=r"^settings: whole: it does not fit$"):
        settings.read(Run, None, ["whole.name=x"])
    with pytest.raises(RecipeError, match=r"x{50}\.\.\.: "):
        settings.read(Run, None, ["whole.loop.steps=" + "x" * 5000])


def test_the_page_of_settings_is_made_from_their_classes():
    from woodshed.cli import reference
    from woodshed.stages.recipe import Recipe

    made = Path(__file__).parents[1] / "docs" / "settings.md"
    assert made.read_text("utf-8") == reference.page(Recipe), (
        "woodshed settings --markdown > docs/settings.md"
    )
    described = [each for section in reference.sections(Recipe) for each in section.settings]
    assert {each.name for each in described} == {name for name, _ in settings.leaves(Recipe)}
    assert all(len(each.text) > 10 for each in described), "every setting has a sentence"
    for each in described:  # what the page says is what a recipe without the setting has
        if each.default not in ("unset", "...") and ".servers." not in each.name:
            given = [f"{each.name}={each.default}", "name=x"]
            if not each.name.startswith(("monitors.judge", "critic.endpoint")):
                assert settings.read(Recipe, None, given) == settings.read(Recipe, None, ["name=x"]), (
                    each.name
                )


def test_settings_are_found_by_their_words():
    from woodshed.cli import reference

    class Inner(Settings):
        """An inner section."""

        share: float | None = Field(default=None, gt=0, le=1)
        """Share of a thing."""

    class Outer(Settings):
        """An outer one."""

        kind: Literal["a", "b"] = "a"
        """Kind of thing."""
        inner: tuple[Inner, ...] = ()
        folders: tuple[Path, ...] = (Path("x"),)
        """Places."""

    (kind, folders), (share,) = (section.settings for section in reference.sections(Outer))
    assert [section.heading for section in reference.sections(Outer)] == ["", "[[inner]]"]
    assert (kind.default, kind.values) == ('"a"', "a or b")
    assert (folders.default, folders.values) == ('["x"]', "a list, each a path")
    assert (share.name, share.default, share.values) == (
        "inner.share",
        "unset",
        "a number, above 0 to 1",
    )
    assert reference.matching(Outer, ["thing", "INNER"]) == [share]
    assert len(reference.matching(Outer, [])) == 3


def test_a_setting_or_section_by_its_name_is_that_alone():
    from woodshed.cli import reference
    from woodshed.stages.recipe import Recipe

    (teacher,) = reference.matching(Recipe, ["feedback.teacher"])
    assert teacher.values == "frozen, ema, live or trust-region" and "0.5B" in teacher.chosen_on
    assert {each.name.partition(".")[0] for each in reference.matching(Recipe, ["loss"])} == {"loss"}
    (limit,) = reference.matching(Recipe, ["agent.timeout_s"])
    assert limit.values == "a number of seconds, above 0"


@pytest.mark.parametrize("path", sorted(Path("recipes").glob("*.toml")), ids=lambda path: path.name)
def test_what_differs_from_the_usual_is_the_whole_recipe(path: Path):
    from woodshed.cli import reference
    from woodshed.stages.recipe import Recipe

    chosen = settings.read(Recipe, path).model_copy(update={"variants": {}})
    for notes in (None, {}):
        text = reference.commented(chosen, notes)
        assert settings.validate(Recipe, tomllib.loads(text)) == chosen


def test_a_presets_values_are_the_usual_ones():
    from woodshed.learning.loss_settings import FeedbackSettings

    assert FeedbackSettings(preset="opsd").differing() == {"preset": "opsd"}
    assert FeedbackSettings(preset="opsd", teacher="ema").differing() == {"preset": "opsd", "teacher": "ema"}
    assert FeedbackSettings().differing() == {}
