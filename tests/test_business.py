"""Tasks of a repository as businesses have them, as its owner would ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import business
import pytest

from woodshed import synthesis
from woodshed.records import TaskError
from woodshed.synthesis import SynthesisSettings, baseline, sources, suite
from woodshed.tasks import folder


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The private package, where pip finds it."""
    place = business.private_wheel(tmp_path_factory.mktemp("wheels"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", f"{os.environ.get('PIP_FIND_LINKS', '')} {place}")
        patch.setenv("SHOP_REGION", "north")
        yield place


@pytest.fixture(scope="module")
def made(
    private: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, synthesis.MakeReport, list[str]]:
    root = tmp_path_factory.mktemp("business")
    settings = SynthesisSettings(
        operators=("remove_class", "stub"),
        limit=2,
        env=("SHOP_REGION",),
        timeout_s=300,
        deselect=("tests/test_tax.py::test_gross",),
    )
    said: list[str] = []
    report = synthesis.make(
        [str(business.lay(root / "shop"))],
        root / "out",
        settings,
        lambda done, total, text: said.append(text),
    )
    return root / "out", report, said


def test_what_conftest_imports_can_be_taken_away(made):
    out = made[0]
    task = folder.load(out / "shop-remove_class-Cart")
    shown = (task.folder / "environment/workspace/tests/conftest.py").read_text()
    assert "Cart" not in shown and "def rates" in shown
    assert "Cart()" in (task.folder / "tests/files/tests/conftest.py").read_text()
    assert set(task.behaviour_tests) == {
        f"tests/test_cart.py::test_{name}" for name in ("total", "add", "count")
    }
    assert task.pass_to_pass == () and "tests/test_tax.py::test_rates" in task.fail_to_pass
    assert "test_rates" in (task.folder / "environment/workspace/tests/test_tax.py").read_text()
    assert not {d.test.partition("::")[0] for d in task.decoys} - {"tests/test_cart.py"}
    assert synthesis.check(task) == []


def test_the_repository_s_own_selection_is_honoured(made):
    (task,) = (task for task in made[1].accepted if task.operator == "stub")
    assert task.environment.pytest_options == ("-m", "not slow", "--deselect=tests/test_tax.py::test_gross")
    tests = {*task.fail_to_pass, *task.pass_to_pass}
    assert task.pass_to_pass and "tests/test_tax.py::test_tax" in tests
    assert not tests & {f"tests/test_tax.py::test_{name}" for name in ("many", "gross", "of_another_year")}
    assert task.test_command.startswith("python -m pytest -q --deselect=tests/test_tax.py::test_gross ")


def test_a_variable_is_named_in_a_task_and_its_value_is_not(made, private, monkeypatch: pytest.MonkeyPatch):
    out = made[0]
    task = made[1].accepted[0]
    assert task.environment.variables == ("SHOP_REGION",)
    assert 'SHOP_REGION = "${SHOP_REGION}"' in (task.folder / "task.toml").read_text()
    for path in (p for p in out.rglob("*") if p.is_file() and "north" in p.read_text(errors="replace")):
        assert path.name == "tax.py"  # the repository's own text
    monkeypatch.delenv("SHOP_REGION")
    with pytest.raises(TaskError, match="need the environment variable SHOP_REGION, which is not set here"):
        synthesis.check(task)


def test_what_was_left_out_is_said_with_its_reason(made):
    out, report, said = made
    (failing,) = [note for note in report.notes if "fail here" in note]
    assert (
        "test_of_another_year (/workspace/tests/test_tax.py:26: AssertionError: the rate of 2020" in failing
    )
    (log,) = (out / ".logs").glob("*.log")
    assert failing.endswith(f"All reasons are in {log}") and "the rate of 2020" in log.read_text()
    later = said[[text.partition(" ")[0] for text in said].index("mapping") :]
    assert all("for the whole build" in text or "to the first tasks" in text for text in later)


def test_a_variable_that_is_missing_is_asked_for(private: Path, tmp_path: Path):
    repository = sources.fetch(str(business.lay(tmp_path / "shop")), tmp_path / "tree")
    with pytest.raises(TaskError, match=r"SHOP_REGION: an environment variable.*--env SHOP_REGION=VALUE"):
        baseline.measure(repository, limits=suite.SuiteLimits(runs=1))
