"""Stubs: names without behaviour, the hidden tests that are content with them, and what such an answer earns."""

from __future__ import annotations

from pathlib import Path

import pytest

from woodshed import grading, synthesis
from woodshed.records import Patch, Task
from woodshed.synthesis import stats, stubs
from woodshed.tasks import folder

PAINT = '''
"""Paint."""

from dataclasses import dataclass

LIMIT = 3
TABLE = {"red": 1, "green": 2}


def mark(text, times=1):
    """Stars around a text.

    Not too many.
    """
    if times > LIMIT:
        raise ValueError(times)
    return "*" * times + text + "*" * times


def is_bright(colour):
    return TABLE.get(colour, 0) > 1


def each(words):
    for word in words:
        yield mark(word)


@dataclass
class Brush:
    """A brush."""

    width: int = 2
    kind = "round"

    def __init__(self, width=2):
        self.width = width

    def __len__(self):
        return self.width

    def paint(self, text):
        return mark(text, self.width)
'''

EMPTY = '''
"""Paint."""

from dataclasses import dataclass

LIMIT = None
TABLE = None


def mark(text, times=1):
    """Stars around a text.

    Not too many.
    """
    return None


def is_bright(colour):
    return None


def each(words):
    return; yield


@dataclass
class Brush:
    """A brush."""

    width: int = None
    kind = None

    def __init__(self, width=2):
        return None

    def __len__(self):
        return None

    def paint(self, text):
        return None
'''


def one(original: str, shown: str, kind: str) -> str | None:
    return stubs.stubs({"m.py": original}, {"m.py": shown}).get(kind, {}).get("m.py")


def test_a_module_comes_back_with_every_name_and_nothing_else():
    assert one(PAINT, "", "empty") == stubs.stubs({"m.py": PAINT}, {"m.py": None})["empty"]["m.py"] == EMPTY
    argument = one(PAINT, "", "argument") or ""
    for line in ("return text", "return colour", "yield words", "return self", "return None"):
        assert f"    {line}\n" in argument
    assert (one(PAINT, "", "raises") or "").count("raise NotImplementedError") == 6


def test_what_is_still_there_stays():
    shown = PAINT.replace(PAINT[PAINT.index("def is_bright") : PAINT.index("def each")], "")
    expected = PAINT.replace("return TABLE.get(colour, 0) > 1", "return None")
    assert one(PAINT, shown, "empty") == expected
    method = PAINT[: PAINT.index("    def paint")]
    assert one(PAINT, method, "empty") == PAINT.replace("return mark(text, self.width)", "return None")


def test_a_body_that_raises_is_a_stub_already():
    shown = PAINT.replace("return TABLE.get(colour, 0) > 1", 'raise NotImplementedError("is_bright")')
    assert stubs.stubs({"m.py": PAINT}, {"m.py": shown}).keys() == {"empty", "argument"}


def test_a_parameter_comes_back_without_effect():
    shown = "def f(x):\n    return x\n"
    original = "def f(x, twice=False):\n    if twice:\n        return 2 * x\n    return x\n"
    wanted = {"m.py": "def f(x, twice=False):\n    return x\n"}
    assert stubs.stubs({"m.py": original}, {"m.py": shown}) == dict.fromkeys(stubs.KINDS, wanted)


@pytest.mark.parametrize(
    "shown",
    [
        PAINT.replace("times > LIMIT", "times >= LIMIT"),
        PAINT.replace('"green": 2', '"blue": 2'),
        PAINT.replace("@dataclass\n", ""),
        "def broken(:\n",
    ],
    ids=["a bug", "an entry", "a decorator", "no Python"],
)
def test_where_no_name_is_missing_there_is_no_stub(shown: str):
    assert stubs.stubs({"m.py": PAINT}, {"m.py": shown}) == {}


def test_a_commit_is_taken_back_in_what_it_changed():
    before = PAINT.replace("TABLE.get(colour, 0) > 1", "colour == 'green'").replace(
        "    def __len__", "    def len"
    )
    text = one(PAINT, before, "empty") or ""
    assert "return colour == 'green'" in text and "    def __len__(self):\n        return None\n" in text
    assert "return mark(text, self.width)" in text


@pytest.mark.parametrize(
    ("original", "line"),
    [
        ("def f(*rest): return 1\n", "return rest"),
        ("def f(*, key): return 1\n", "return key"),
        ("def f(): return 1\n", "return None"),
        ("async def f(a):\n    yield 1\n", "yield a"),
        ("@contextlib.contextmanager\ndef f():\n    yield 1\n", "yield"),
        (
            "class C(tuple):\n    def __new__(cls, a):\n        return tuple.__new__(cls, a)\n",
            "return super().__new__(cls)",
        ),
        ("class C:\n    @property\n    def f(self):\n        return 1\n", "return self"),
        ("class C:\n    @staticmethod\n    def f(a):\n        return 1\n", "return a"),
    ],
)
def test_bodies_that_return_their_argument(original: str, line: str):
    assert f" {line}\n" in (one(original, "", "argument") or "")


# ---- tasks ------------------------------------------------------------------------------------------------

TESTS = """
import pytest

import paint
from paint import Brush, LIMIT, is_bright, mark


def test_exists():
    assert callable(mark) and callable(is_bright) and isinstance(Brush, type)


def test_dark():
    assert not is_bright("red") and not is_bright("black")


def test_bright():
    assert is_bright("green")


@pytest.mark.parametrize("n", range(5))
def test_is_called(n):
    mark("x")
    is_bright("x")


@pytest.mark.parametrize(("times", "said"), [(0, "a"), (1, "*a*"), (2, "**a**")])
def test_mark(times, said):
    assert mark("a", times) == said


def test_too_many():
    with pytest.raises(ValueError):
        mark("a", 1 + 3)


def test_paint():
    assert Brush(3).paint("a") == "***a***" and len(Brush()) == 2


def test_limit():
    assert LIMIT == 3
"""
OTHER = "def test_nothing():\n    assert 1 + 1 == 2\n"
ALIAS = "{name} = lambda *a, **k: None\n"
GETATTR = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return print
"""
SETTINGS = synthesis.SynthesisSettings(operators=("remove",), timeout_s=300, max_lost=1, min_strength=0)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    root = tmp_path_factory.mktemp("sources") / "paint"
    root.mkdir()
    more = "def double(x):\n    return x + x\n"
    files = {
        "paint/__init__.py": PAINT,
        "paint/more.py": more,
        "test_paint.py": TESTS,
        "test_other.py": OTHER,
    }
    files["test_more.py"] = (
        "from paint.more import double\n\n\ndef test_double():\n    assert double('a') == 'aa'\n"
    )
    for path, text in files.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    made = synthesis.make([str(root)], tmp_path_factory.mktemp("made") / "paint", SETTINGS)
    return {task.name.removeprefix("paint-"): task for task in made.accepted}


def test_tests_that_a_stub_passes_are_no_tests_of_behaviour(tasks: dict[str, Task]):
    removed = tasks["remove-mark"]
    names = {test.partition("::")[2].partition("[")[0] for test in removed.behaviour_tests}
    assert names == {"test_mark", "test_too_many", "test_paint"} and len(removed.fail_to_pass) == 14
    assert {len(tests) for tests in removed.stub_passes.values()} == {9, 10, 4}
    predicate = tasks["remove-is_bright"]
    assert (
        len(predicate.stub_passes["empty"]) == 13
        and "test_paint.py::test_bright" in predicate.behaviour_tests
    )
    assert folder.load(removed.folder) == removed and synthesis.check(removed) == []
    rows = {(row.group, row.name): row for row in stats.summarise([removed], Path("none")).rows}
    row = rows["operator", "remove"]
    assert (row.fail_to_pass, row.behaviour) == (14, 4)


def answers(task: Task) -> dict[str, dict[str, str]]:
    """Answers without behaviour, for a task that removed a function."""
    path, name = task.target_path, task.target_symbol
    shown = (task.folder / "environment" / "workspace" / path).read_text()
    gold = {path: (task.folder / "solution" / "files" / path).read_text()}
    made = {
        kind: {p: t or "" for p, t in texts.items()}
        for kind, texts in stubs.stubs(gold, {path: shown}).items()
    }
    return {**made, "alias": {path: shown + ALIAS.format(name=name)}, "getattr": {path: shown + GETATTR}}


@pytest.mark.parametrize("name", ["remove-mark", "remove-is_bright"])
def test_a_name_alone_earns_nothing(tasks: dict[str, Task], name: str):
    for kind, files in answers(tasks[name]).items():
        verdict = grading.grade(
            tasks[name], Patch(dict(files)), settings=grading.GradingSettings(shaped=True)
        )
        passed = sum(verdict.outcomes[test] == "passed" for test in tasks[name].fail_to_pass)
        assert passed >= 4 and verdict.reward == 0 and not verdict.solved, kind


def test_half_of_the_behaviour_earns_its_share(tasks: dict[str, Task]):
    task = tasks["remove-mark"]
    gold = (task.folder / "solution/files/paint/__init__.py").read_text()
    half = gold.replace("raise ValueError(times)", "pass")
    verdict = grading.grade(
        task, Patch({"paint/__init__.py": half}), settings=grading.GradingSettings(shaped=True)
    )
    assert verdict.reward == pytest.approx(0.75) and not verdict.solved
    assert (
        grading.grade(task, folder.gold_patch(task), settings=grading.GradingSettings(shaped=True)).reward
        == 1
    )


def test_a_task_that_asks_for_a_name_alone_is_refused(tmp_path: Path):
    (tmp_path / "idle").mkdir()
    (tmp_path / "idle/idle.py").write_text(
        "def rest(x):\n    y = x\n    return y\n\n\ndef work():\n    return 2\n"
    )
    tests = "from idle import rest, work\n\n\ndef test_rest():\n    assert rest(1) == 1\n\n\n"
    tests += "def test_work():\n    work()\n"
    (tmp_path / "idle/test_idle.py").write_text(tests)
    (tmp_path / "idle/test_other.py").write_text(OTHER)
    settings = SETTINGS.model_copy(update={"operators": ("remove_module",)})
    report = synthesis.make([str(tmp_path / "idle")], tmp_path / "out", settings)
    assert report.accepted == [] and report.rejected == {"trivial": 1}
    log = (tmp_path / "out/rejections.jsonl").read_text()
    assert "2 failing tests accept bodies that return their first argument" in log
