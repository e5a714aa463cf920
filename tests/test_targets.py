"""Targets of tasks: held-out tasks share none with those to practise on, and samples spread over repositories."""

from dataclasses import replace
from pathlib import Path

import pytest

from woodshed.records import RecipeError, Task
from woodshed.tasks import targets

CODE = """\
class Box:
    size = 1

    def put(self, x):
        return x + 1

    def take(self, x):
        return x - 1


def use(x):
    def inner(y):
        return y

    return inner(x)
"""
STUB = "raise NotImplementedError"


@pytest.fixture
def make(tiny_task: Task, tmp_path: Path):
    """A maker of tasks that know no more than their two versions of a file."""

    def task(name: str, symbol: str, before: str, source: str = "pypi:box==1.0") -> Task:
        home = tmp_path / name
        for place, text in (("environment/workspace", before), ("solution/files", CODE)):
            (home / place).mkdir(parents=True)
            (home / place / "box.py").write_text(text, encoding="utf-8")
        made = replace(tiny_task, id=name, name=name, folder=home, target_path="box.py", target_symbol=symbol)
        return replace(made, provenance={"source": source})

    return task


def test_targets_are_the_definitions_whose_own_lines_are_gone(make):
    put = make("a", "Box.put", CODE.replace("return x + 1", STUB))
    assert targets.targets(put) == {("pypi:box", "box.py", "Box.put")}
    whole = make("b", "Box", CODE[CODE.index("def use") :])
    names = {name for _, _, name in targets.targets(whole)}
    assert names == {"Box", "Box.put", "Box.take"}
    inner = make("c", "use", CODE.replace("return y", STUB))
    assert {name for _, _, name in targets.targets(inner)} == {"use"}


def test_no_target_is_on_both_sides_and_a_wide_task_of_both_is_on_neither(make):
    put = make("a", "Box.put", CODE.replace("return x + 1", STUB))
    bug = make("b", "Box.put", CODE.replace("x + 1", "x - 1"), "pypi:box==2.0")
    take = make("c", "Box.take", CODE.replace("return x - 1", STUB))
    use = make("d", "use", CODE.replace("return inner(x)", STUB))
    elsewhere = make("e", "Box.put", CODE.replace("return x + 1", STUB), "pypi:other==1.0")
    narrow, whole = [put, bug, take, use, elsewhere], make("f", "Box", CODE[CODE.index("def use") :])
    parted, wide = targets.groups([*narrow, whole])
    assert [[task.id for task in group] for group in parted] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert wide == [whole]
    for share, held in ((0.2, "c"), (0.4, "ab"), (0.6, "abcf"), (0.8, "abcdf")):
        practice, heldout = targets.split([*narrow, whole], share)
        sides = [frozenset().union(*map(targets.targets, side)) for side in (practice, heldout)]
        assert practice and not sides[0] & sides[1]
        assert sorted(task.id for task in heldout) == [*held]
        assert targets.split([*reversed(narrow), whole], share)[1] == heldout
    with pytest.raises(RecipeError, match="2 tasks share code with each other"):
        targets.split([put, bug], 0.5)


def test_a_sample_spreads_over_repositories_and_then_over_targets(make):
    sources = ["pypi:a==1", "pypi:b==1", "pypi:c==1"]
    known = [
        make(f"{source[5]}{n}", f"f{n // 2}", CODE.replace("return y", STUB), source)
        for source in sources
        for n in range(6)
    ]
    drawn = targets.sample(known, 9, 0)
    assert [task.id[0] for task in drawn] == [*"aaabbbccc"]
    assert len({(task.id[0], task.target_symbol) for task in drawn}) == 9
    assert targets.sample(known, 9, 0) == drawn != targets.sample(known, 9, 1)
    assert targets.sample(known, 0, 0) == targets.sample(known, 99, 0) == known
