"""The grader that a task folder ships decides as `grade` does: the same code, the same rewards."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from adversaries.test_cheats import CHEATS, STEALS, at_import
from test_decoys import ALL_PASS

from woodshed import grading, tasks
from woodshed.grading import GradingSettings
from woodshed.grading.decoys import decoded, find
from woodshed.grading.other_user import OtherUser, tops
from woodshed.records import Decoy, Patch, Task
from woodshed.sandbox import BUBBLEWRAP, Sandbox

ROOT = Path(__file__).parent.parent
EQUAL = "class Equal(list):\n    {}\n\n    def items(self): return [('the', 3), ('sea', 2)]\n\n"
EQUAL += "def split(text): return Equal()\n\ndef count(text): return Equal()\n"


def written(words: str) -> dict[str, str | None]:
    return {"tally/words.py": words}


def patches(task: Task) -> dict[str, dict[str, str | None]]:
    """Honest ones, wrong ones, and cheats of every kind that the verifier has a wall against."""
    gold = tasks.gold_patch(task).files["tally/words.py"] or ""
    shown = tasks.original(task, "tally/words.py").read_text("utf-8")
    stub = 'raise NotImplementedError("count")'
    names = {
        "edits the test files",
        "deletes what is tested",
        "conftest in the package",
        "ini loads a plugin of the repository",
        "stands in for a standard module",
        "os._exit(0) at import",
        "writes fake results to every descriptor",
        "writes reward files",
        "rewrites the tests and puts them back",
        "a background process rewrites files",
        "replaces how tests are run, but not the sentinels",
        "registers a plugin that it finds in memory",
        "replaces a builtin",
    }
    cheats = {cheat.name: cheat.files for cheat in CHEATS if cheat.name in names}
    assert set(cheats) == names
    return {
        "gold": written(gold),
        "gold, and more": {
            **written(gold),
            "tally/more.py": "x = 1\n",
            "tests/test_more.py": "def test(): pass\n",
        },
        "empty": {},
        "wrong": written(shown.replace(stub, "return {}")),
        "right for one text": written(shown.replace(stub, 'return {"a": 2, "b": 1}')),
        "another module is gone": {**written(gold), "tally/table.py": None},
        "a parameter is gone": {
            **written(
                gold.replace("def split(text):", "def split(line):").replace(
                    "in text.split()", "in line.split()"
                )
            )
        },
        "always equal": written(EQUAL.format("def __eq__(self, other): return True")),
        "steals from frames": written(STEALS),
        "writes every outcome as a pass": written(f"{shown}\n{ALL_PASS}"),
        **cheats,
    }


def box(task: Task, **changes: Any):
    """The box of another harness: the agent's workspace, /tests and /logs, and one user for everything."""
    spec = dataclasses.replace(tasks.sandbox_spec(task), binds={"/tests": tasks.grading_files(task)})
    return BUBBLEWRAP.open(dataclasses.replace(spec, scratch=("/logs",), user="grader", **changes))


def shipped(sandbox: Sandbox, files: dict[str, str | None]) -> dict[str, Any]:
    """What tests/test.sh writes once the whole patch lies in the workspace, tests and configuration included."""
    for path, text in files.items():
        if text is not None and ".." not in path:
            sandbox.write(path, text.encode())
        elif text is None:
            sandbox.exec(["rm", "-f", "--", path])
    done = sandbox.exec("bash /tests/test.sh", timeout_s=120)
    assert done.outcome == "ok", done
    assert sandbox.exec("ls /logs/verifier").stdout.split() == [b"reward.json"]
    return json.loads(sandbox.read("/logs/verifier/reward.json"))


@pytest.fixture(scope="module")
def proven(tiny_task: Task, tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A task as making leaves it: with a decoy, and with the tests that pass in two processes."""
    tests = tasks.protected_files(tiny_task)
    path, test = "tests/test_table.py", "tests/test_table.py::test_top"
    text, _ = decoded(tests[path])
    function = find(text, test)
    assert function is not None
    start = text[function.start :].index('("sea", 2)')
    decoy = Decoy(test, start, start + len('("sea", 2)'), '("sea", 3)')
    gold = {path: (text or "").encode() for path, text in tasks.gold_patch(tiny_task).files.items()}
    home = tmp_path_factory.mktemp("proven") / tiny_task.name
    given = dataclasses.replace(tiny_task, decoys=(decoy,))
    task = tasks.write(given, home, workspace=tasks.workspace(tiny_task), tests=tests, gold=gold)
    grading.keep_isolated_tests(task, BUBBLEWRAP)
    return task


def test_the_shipped_grader_gives_the_rewards_of_grade(proven: Task):
    rewards: dict[str, tuple[float, float]] = {}
    theirs: dict[str, tuple[float, float]] = {}
    cheats = {cheat.name for cheat in CHEATS}
    for name, files in patches(proven).items():
        rewards[name] = 0.0, 0.0
        if name not in cheats:  # `test_cheats_earn_nothing` says so
            ours = grading.grade(proven, Patch(files), settings=GradingSettings(shaped=True))
            rewards[name] = float(ours.solved), ours.reward
        with box(proven) as sandbox:
            found = shipped(sandbox, files)
        theirs[name] = found["reward"], found["shaped"]
    assert theirs == rewards
    assert {name for name, (reward, _) in rewards.items() if reward} == {"gold", "gold, and more"}
    assert rewards["right for one text"] == (0.0, 0.25)


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            try:
                open("/logs/verifier/reward.json", "w").write('{"reward": 1.0}')
            except OSError:
                pass
            time.sleep(0.001)
    os._exit(0)
"""


def test_a_process_that_outlives_its_test_writes_no_reward(proven: Task):
    with box(proven) as sandbox:
        sandbox.write("tally/words.py", str(at_import(DAEMON)["tally/words.py"]).encode())
        done = sandbox.exec("bash /tests/test.sh; sleep 0.2; cat /logs/verifier/reward.json", timeout_s=60)
    assert json.loads(done.stdout.splitlines()[-1])["reward"] == 0.0, done


def test_who_kills_the_grader_earns_nothing(tiny_task: Task):
    """Nothing is known to be isolated in this folder: all processes are of one user, and one may kill the others."""
    kills = "import os\nos.kill(os.getppid(), 9)\nimport time\ntime.sleep(9)"
    with box(tiny_task) as sandbox:
        sandbox.write("tally/words.py", str(at_import(kills)["tally/words.py"]).encode())
        assert sandbox.exec("bash /tests/test.sh", timeout_s=60).outcome == "nonzero"
        assert json.loads(sandbox.read("/logs/verifier/reward.json")) == {"reward": 0.0}


def test_a_box_without_the_runners_python_gives_no_reward(proven: Task):
    """Nothing of the patch is to blame, so it is not a 0 either."""
    with box(proven, environment=None) as sandbox:
        sandbox.exec("mkdir -p bin; ln -s /usr/bin/python3 bin/python")
        done = sandbox.exec("PATH=/workspace/bin:$PATH bash /tests/test.sh", timeout_s=60)
        assert json.loads(sandbox.read("/logs/verifier/reward.json"))["reward"] is None, done


def test_another_user_and_view_of_a_box_where_the_kernel_grants_them(tmp_path: Path):
    """Code that is right only for the user of the box, or where the judge's folder is, is wrong in one run there."""
    needed = (tmp_path, Path(sys.prefix), Path(sys.base_prefix), ROOT)
    assert tops([tmp_path / "tests", Path("/logs/verifier")], needed) == {"logs"}
    (tmp_path / "root").mkdir()
    other = OtherUser(tmp_path / "root", frozenset({"media"}), tmp_path)
    if not other.is_possible():
        pytest.skip("the kernel grants no namespaces")
    program = "import os; print(os.getuid(), os.path.exists('/media'), os.path.exists('/usr'), os.getcwd())"
    program += "; print(open('/proc/self/status').read().partition('CapEff:')[2].split()[0])"
    done = subprocess.run(
        [sys.executable, "-c", program], preexec_fn=other.enter, capture_output=True, text=True
    )
    user, *rest = done.stdout.split()
    assert int(user) != os.getuid() and rest == ["False", "True", str(tmp_path), "0" * 16], done.stderr
    assert list((tmp_path / "root").iterdir()) == [], "it is seen by others"


def test_it_needs_the_standard_library_and_pytest_alone(tiny_task: Task):
    """Also inside functions, a shipped file imports Python's library, pytest, or another shipped file."""
    root = tiny_task.folder / "tests"
    package = root / "grader"
    shipped_modules = {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        for path in package.rglob("*.py")
    }
    for path in [*package.rglob("*.py"), *root.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in shipped_modules else str(node.module) for name in inner]
            for name in names:
                top = name.partition(".")[0]
                is_known = top in sys.stdlib_module_names or top in ("pytest", "_pytest")
                assert is_known or name in shipped_modules, (path, name)


def test_what_is_shipped_is_what_decides(tiny_task: Task):
    """Byte for byte: nothing is written twice."""
    package = Path(grading.__file__).parent.parent
    copies = [
        p for p in (tiny_task.folder / "tests/grader/woodshed").rglob("*.py") if p.name != "__init__.py"
    ]
    assert "grading/decision.py" in {
        p.relative_to(tiny_task.folder / "tests/grader/woodshed").as_posix() for p in copies
    }
    for copy in copies:
        original = package / copy.relative_to(tiny_task.folder / "tests/grader/woodshed")
        assert copy.read_bytes() == original.read_bytes()
