"""Code under test that lives in another process than its judge, and what it tries from there. None of it is paid."""

from __future__ import annotations

import dataclasses
import json

import pytest
from test_shipped import box, shipped

from woodshed import grading, tasks
from woodshed.records import Patch, Task
from woodshed.sandbox import BUBBLEWRAP

ONLY_WHERE = {
    "the user is the grader": 'os.environ.get("USER") == "grader"',
    "the uid is the grader's": "os.getuid() == 1001",
    "pytest runs": '"pytest" in sys.modules',
    "pytest says that it runs": 'any(name.startswith("PYTEST_") for name in os.environ)',
    "the hash seed is the ordinary one": 'os.environ.get("PYTHONHASHSEED") == "0"',
    "temporary files lie in /tmp": '__import__("tempfile").gettempdir() == "/tmp"',
    "the program is a file": '"-c" not in sys.orig_argv',
    "the program is a text": '"-c" in sys.orig_argv',
}


@pytest.mark.parametrize("where", ONLY_WHERE)
def test_code_that_is_right_only_in_some_surroundings_is_not_paid(tiny_task: Task, where: str):
    gold = tasks.gold_patch(tiny_task).files["tally/words.py"] or ""
    wrong = f"\n\nimport os, sys\nif not ({ONLY_WHERE[where]}):\n    def count(text): return {{}}\n"
    verdict = grading.grade(
        tiny_task, Patch({"tally/words.py": gold + wrong}), settings=grading.GradingSettings(shaped=True)
    )
    assert (verdict.status, verdict.solved, verdict.reward) == ("graded", False, 0.0), verdict


SPLIT = (
    'def split(text):\n    return [w.strip(".,;:!?").lower() for w in text.split() if w.strip(".,;:!?")]\n\n'
)
SIDE = "import sys\nside = next((m for n, m in sys.modules.items() if n.endswith('.code_side')), None)\n"
FROM_THERE = {
    "answers that the answer was given": (
        "def count(text):\n    side.peer.line.send(['answer', [None, []], {}])\n    return {}\n"
    ),
    "says that pytest skips": (
        "def count(text):\n"
        "    side.peer.line.send(['raise', [['error', 1, ['name', '_pytest.outcomes', 'Skipped'], [], None,"
        " ['dict', []], []]], {}])\n"
    ),
    "returns what evaluates": "def count(text):\n    return eval\n",
    "claims to be a dictionary": (
        "class Equal(dict):\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    def items(self): return [('the', 3), ('sea', 2)]\n"
        "def count(text): return Equal()\n"
    ),
    "describes a type that is equal to everything": (
        "class Any:\n"
        "    __hash__ = None\n"
        "    def __eq__(self, other): return True\n"
        "    def items(self): return [('the', 3), ('sea', 2)]\n"
        "Any.__name__ = Any.__qualname__ = 'dict'\nAny.__module__ = 'builtins'\n"
        "def count(text): return Any()\n"
    ),
    "plants modules and bytecode": (
        "import os\n"
        "for place in ('/workspace', '/workspace/tests', '/workspace/tally', os.environ.get('TMPDIR', '/tmp')):\n"
        "    for name in ('colorsys', 'pdb', 'pygments', 'attr', 'conftest2', 'sitecustomize', 'usercustomize'):\n"
        "        try: open(f'{place}/{name}.py', 'w').write('import os; os._exit(0)')\n"
        "        except OSError: pass\n"
        "def count(text): return {}\n"
    ),
    "reads the memory of the tests": (
        "import os\n"
        "def count(text):\n"
        "    for pid in (os.getppid(), 1, 2, 3):\n"
        "        for name in ('mem', 'environ', 'maps', 'fd', 'cwd/x', 'root/x'):\n"
        "            try: open(f'/proc/{pid}/{name}', 'rb').read(1)\n"
        "            except OSError: pass\n"
        "            else:\n"
        "                if pid == os.getppid() and name in ('mem', 'environ', 'maps'): raise SystemExit('open')\n"
        "    return {}\n"
    ),
    "kills the tests": "import os\ndef count(text):\n    os.kill(os.getppid(), 9)\n    return {}\n",
    "dies": "import os\ndef count(text): os._exit(0)\n",
    "floods the line": "def count(text): return 'x' * (64 << 20)\n",
    "nests without end": "def count(text):\n    a = []\n    for _ in range(100_000): a = [a]\n    return a\n",
    "writes to every descriptor": (
        "import os\n"
        "for fd in range(1, 256):\n"
        '    try: os.write(fd, b\'0\' * 32 + b\' {"kind": "end", "count": 0}\\n\')\n'
        "    except OSError: pass\n"
        "def count(text): return {}\n"
    ),
    "imports pytest and replaces how tests are run": (
        "import _pytest.python as p, _pytest.reports as r\n"
        "p.Function.runtest = lambda self: None\n"
        "r.TestReport.outcome = property(lambda self: 'passed', lambda self, value: None)\n"
        "def count(text): return {}\n"
    ),
}


@pytest.mark.parametrize("act", FROM_THERE)
def test_what_code_does_from_its_own_process_is_not_paid(tiny_task: Task, act: str):
    """One hidden test of four expects what an idle `count` returns, so a share of that is honest; what is an empty
    dictionary and has the items that another asks for is right in both."""
    most = 0.5 if act == "claims to be a dictionary" else 0.25
    patch = Patch({"tally/words.py": SIDE + SPLIT + FROM_THERE[act]})
    verdict = grading.grade(tiny_task, patch, settings=grading.GradingSettings(shaped=True))
    assert (verdict.status, verdict.solved) == ("graded", False) and verdict.reward <= most, verdict


def test_the_shipped_grader_isolates_as_well(tiny_task: Task, tmp_path_factory: pytest.TempPathFactory):
    """The same rewards for these, where one user does everything."""
    home = tmp_path_factory.mktemp("shipped") / tiny_task.name
    tests = tasks.protected_files(tiny_task)
    gold = {path: (text or "").encode() for path, text in tasks.gold_patch(tiny_task).files.items()}
    task = tasks.write(
        dataclasses.replace(tiny_task), home, workspace=tasks.workspace(tiny_task), tests=tests, gold=gold
    )
    grading.keep_isolated_tests(task, BUBBLEWRAP)
    isolated = json.loads((home / "tests/expected.json").read_text("utf-8"))["isolated"]["tests"]
    assert {*isolated} == {*task.fail_to_pass, *task.pass_to_pass}
    text = tasks.gold_patch(task).files["tally/words.py"] or ""
    for where in ("pytest runs", "the hash seed is the ordinary one", "the program is a text"):
        wrong = f"\n\nimport os, sys\nif not ({ONLY_WHERE[where]}):\n    def count(text): return {{}}\n"
        with box(task) as sandbox:
            assert shipped(sandbox, {"tally/words.py": text + wrong})["reward"] == 0.0, where
    for act in ("answers that the answer was given", "kills the tests"):
        with box(task) as sandbox:
            assert shipped(sandbox, {"tally/words.py": SIDE + SPLIT + FROM_THERE[act]})["reward"] == 0.0, act
    with box(task) as sandbox:
        assert shipped(sandbox, {"tally/words.py": text})["reward"] == 1.0
