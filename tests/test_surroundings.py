"""Runs of one verdict have no mark in common that code could ask for: right only there is wrong in one of them."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
from conftest import tiny_environment

from woodshed import tasks
from woodshed.grading.results import Kind, SessionRequest, drawn
from woodshed.grading.session import run_session, with_copies
from woodshed.sandbox import SandboxSpec, open_sandbox
from woodshed.sandbox.spec import ENVIRONMENT

MARKS = {
    "a module of the judge": "any('woodshed' in name for name in sys.modules)",
    "a module of the judge or of pytest": (
        "any('isolat' in n or 'hardening' in n for n in sys.modules) or 'pytest' in sys.modules"
    ),
    "a name in builtins": "any('woodshed' in name for name in dir(builtins))",
    "words on the command line": (
        "any(w in ' '.join(sys.orig_argv + sys.argv) for w in ('woodshed', 'runner', 'pytest', '-B'))"
    ),
    "words on the command line that /proc tells": (
        "any(w in read('self/cmdline') for w in ('woodshed', 'runner', '/run/', '-P'))"
    ),
    "words on the command line of the parent": (
        "any(w in read(f'{os.getppid()}/cmdline') for w in ('woodshed', 'runner', 'pytest'))"
    ),
    "a folder of the judge": "os.path.exists('/run/woodshed')",
    "some folder in /run": "any(os.path.isdir('/run/' + name) for name in os.listdir('/run'))",
    "some folder in /opt": "set(os.listdir('/opt')) != {'python'}",
    "a mount of the judge": (
        "any(w in read('self/mountinfo') for w in ('isolation', 'grading', 'tests/files', 'blanks'))"
    ),
    "no bytecode by a flag": "sys.flags.dont_write_bytecode == 1",
    "no bytecode": "sys.dont_write_bytecode",
    "no bytecode by a variable": "os.environ.get('PYTHONDONTWRITEBYTECODE') == '1'",
    "no bytecode was written": "not os.path.exists(sys.modules['place'].__cached__)",
    "a safe path": "bool(sys.flags.safe_path)",
    "no packages of the user": "bool(sys.flags.no_user_site)",
    "the hash seed": "os.environ.get('PYTHONHASHSEED') == '0'",
    "variables of pytest": "any('PYTEST' in name for name in os.environ)",
    "variables of the judge": "any('WOODSHED' in name for name in os.environ) or 'WOODSHED' in read('self/environ')",
    "the user": "os.environ.get('USER') == 'grader' or os.getuid() == 1001",
    "the main program's file": "hasattr(sys.modules['__main__'], '__file__')",
    "the main program's names": "any(n in vars(sys.modules['__main__']) for n in ('Recorder', 'sentinels'))",
    "a pipe": "any('pipe' in link for link in links())",
    "a socket": "any('socket' in link for link in links())",
    "one more filter of system calls": "read('self/status').partition('_filters:')[2].split()[:1] not in ([], ['1'])",
    "temporary files": "__import__('tempfile').gettempdir() == '/tmp'",
    "a test that calls": "any('test' in frame.f_code.co_name for frame, _ in __import__('traceback').walk_stack(None))",
    "threads": "len(__import__('threading').enumerate()) > 1",
    "another folder for temporary files": "'TMPDIR' in os.environ",
    "bytecode of tests": (
        "any(name.startswith('test_') and name.endswith('.pyc') for top in ('/tmp', '/workspace', '/home')"
        " for _, _, names in os.walk(top) for name in names)"
    ),
    "the name of a login": "'LOGNAME' in os.environ",
    "another hash seed": "os.environ.get('PYTHONHASHSEED') != '0'",
    "bytecode by a variable": "os.environ.get('PYTHONDONTWRITEBYTECODE') != '1'",
    "bytecode by a variable when it began": "'PYTHONDONTWRITEBYTECODE' not in read('self/environ')",
    "no bytecode by a variable when it began": "'PYTHONDONTWRITEBYTECODE' in read('self/environ')",
    "a path that is blank when it began": "'PYTHONPATH=/workspace' not in read('self/environ').split(chr(0))",
    "another home when it began": "'HOME=/home/agent' not in read('self/environ').split(chr(0))",
    "more variables when it began": (
        "{pair.partition('=')[0] for pair in read('self/environ').split(chr(0))} - USUAL - OF_BASH - {''}"
    ),
    "another user": "os.environ.get('USER') != 'agent' or os.getuid() != 1000",
    "another time zone": "os.environ.get('TZ') != 'UTC'",
    "another folder": "os.getcwd() != '/workspace'",
    "more variables than a command has": "os.environ.keys() - USUAL - OF_BASH",
    "fewer variables than a command has": "USUAL - os.environ.keys()",
    "a stream of the judge's": "type(sys.stdout).__module__ != '_io'",
    "a handler of the judge's": "bool(__import__('logging').getLogger().handlers)",
    "warnings that go elsewhere": "__import__('warnings').showwarning.__module__ != 'warnings'",
    "another way to ask": "builtins.input.__module__ != 'builtins'",
    "a caller that is no program": "len(list(__import__('traceback').walk_stack(None))) > 6",
}
OF_PYTEST = {
    "a module of the judge or of pytest",
    "variables of pytest",
    "the main program's file",
    "the main program's names",
    "a stream of the judge's",
    "a handler of the judge's",
    "a caller that is no program",
    "more variables than a command has",
    "more variables when it began",
    "a path that is blank when it began",
    "a pipe",
    "a test that calls",
}
"""All that tests bring that need the code in their own process, whoever runs them; decoys are beside those."""
OF_ISOLATION = {
    "some folder in /opt",
    "a socket",
    "one more filter of system calls",
    "warnings that go elsewhere",
    "another way to ask",
    "a caller that is no program",
}
"""All that the process of isolated code has and a command of an agent has not."""
USUAL = {*ENVIRONMENT, "PYTHONPATH"}
OF_BASH = {"PWD", "SHLVL", "_"}
PACKAGE = f"""
import builtins, os, sys

def read(name):
    try:
        return open("/proc/" + name).read()
    except OSError:
        return ""

def links():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass

MARKS = {MARKS!r}
USUAL = {USUAL!r}
OF_BASH = {OF_BASH!r}

def holds(name):
    return bool(eval(MARKS[name]))
"""
TESTS = f"""
import pytest
import place

@pytest.mark.parametrize("name", {list(MARKS)})
def test_mark(name): assert place.holds(name)
"""


@functools.cache
def marks(kind: Kind, root: Path) -> set[str]:
    """The marks that code under test finds in a session of this kind."""
    site = tasks.prepare(tiny_environment())
    spec = SandboxSpec(lowers=(root,), environment=site, env={"PYTHONPATH": "/workspace"})
    request = SessionRequest(None, ("place",), kind=kind, own=("tests/test_place.py",), programs=drawn(kind))
    with open_sandbox(with_copies(spec, request, root / kind)) as sandbox:
        run = run_session(sandbox, request, timeout_s=60)
    assert len(run.outcomes) == len(MARKS) and not run.integrity, (run.integrity, run.log)
    return {test.partition("[")[2][:-1] for test, outcome in run.outcomes.items() if outcome == "passed"}


@functools.cache
def plain_marks(root: Path) -> set[str]:
    """The marks that code finds in a command of an agent."""
    site = tasks.prepare(tiny_environment())
    spec = SandboxSpec(lowers=(root,), environment=site, env={"PYTHONPATH": "/workspace"})
    program = "import place; print(*filter(place.holds, place.MARKS), sep='\\n')"
    with open_sandbox(spec) as sandbox:
        done = sandbox.exec(["python", "-c", program])
    assert done.exit_code == 0, done.stderr
    return set(done.stdout.decode().splitlines())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    for path, text in {"place.py": PACKAGE, "tests/test_place.py": TESTS}.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


def test_isolated_code_finds_no_mark_that_a_command_of_an_agent_does_not(root: Path):
    """So a condition that names a mark of each kind of run is as wrong here as where it is used."""
    isolated, plain = marks("isolated", root), plain_marks(root)
    assert isolated - plain <= OF_ISOLATION
    ordinary = marks("ordinary", root)
    bought = [
        {one, other}
        for one, other in itertools.combinations(MARKS, 2)
        if {one, other} & isolated and {one, other} & ordinary and not {one, other} & plain
    ]
    assert all(pair & OF_ISOLATION for pair in bought), bought


def test_a_test_that_is_isolated_runs_where_no_mark_holds_twice(root: Path):
    assert marks("ordinary", root) & marks("isolated", root) == set()


def test_a_test_that_is_not_runs_where_only_pytest_is_the_same(root: Path):
    assert marks("ordinary", root) & marks("again", root) <= OF_PYTEST


@pytest.mark.parametrize("kind", ["ordinary", "isolated", "again"])
def test_no_session_leaves_bytecode_of_tests(root: Path, kind: Kind):
    """It holds what they expect."""
    assert "bytecode of tests" not in marks(kind, root)


def test_names_are_drawn_for_each_run():
    assert len({name for _ in range(20) for name in vars(drawn("isolated")).values()}) == 100
