"""More test cases for a function: calls that its tests make, changed a little, answered by the original code.

A solution that only looks up what the known tests ask fails them. Recorded and answered in a sandbox, twice, with the
gold patch in; only arguments and answers that are plain literals are used (characterisation tests, after Feathers).
"""

from __future__ import annotations

import random
from pprint import pformat

from woodshed.pysource import syntax
from woodshed.records import Task
from woodshed.sandbox import SandboxProvider
from woodshed.tasks import folder
from woodshed.tasks.environment import sandbox_spec

MAX_CASES = 12

RECORD = """
import ast, copy, functools, importlib, sys
import pytest
module, name, *tests = sys.argv[1:]
home = importlib.import_module(module)
original = getattr(home, name)
calls, answers = {}, []

def literal(value):
    try: return ast.literal_eval(repr(value)) == value
    except Exception: return False

@functools.wraps(original)
def wrapper(*args, **kwargs):
    if len(calls) < 300 and literal((args, kwargs)): calls[repr((args, kwargs))] = copy.deepcopy((args, kwargs))
    return original(*args, **kwargs)

for loaded in [m for name, m in sys.modules.items() if name != "__main__"]:
    for key, value in list(getattr(loaded, "__dict__", {}).items()):
        if value is original: setattr(loaded, key, wrapper)
sys.stdout, kept = sys.stderr, sys.stdout
pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", *tests])

def changed(value):
    if isinstance(value, bool): yield not value
    elif isinstance(value, int): yield value + 1; yield -value; yield value * 3 + 2
    elif isinstance(value, float): yield value + 0.5; yield -value
    elif isinstance(value, str): yield value[::-1]; yield value * 2; yield value + " Zz9"; yield ""
    elif isinstance(value, (list, tuple)): yield value[::-1]; yield value + value[:1]; yield value[1:]
    elif isinstance(value, dict): yield dict(list(value.items())[1:])

for args, kwargs in list(calls.values()):
    for position, value in enumerate(args):
        for other in changed(value):
            asked = (*args[:position], other, *args[position + 1:])
            if repr((asked, kwargs)) in calls: continue
            try: first, second = (original(*copy.deepcopy(asked), **copy.deepcopy(kwargs)) for _ in range(2))
            except Exception: continue
            if literal(first) and first == second and len(repr(first)) < 400:
                answers.append((asked, kwargs, first)); calls[repr((asked, kwargs))] = (asked, kwargs)
print(repr(answers[:400]), file=kept)
"""
TEST = '''\
"""More cases, answered by the original code."""

import copy

import pytest

from {module} import {name}

CASES = {cases}


@pytest.mark.parametrize("case", range(len(CASES)))
def test_more(case):
    args, kwargs, expected = copy.deepcopy(CASES[case])
    found = {name}(*args, **kwargs)
    assert type(found) is type(expected)
    assert found == expected
'''


def more_cases(task: Task, module: str, draw: random.Random, sandboxes: SandboxProvider) -> str | None:
    """A test file with up to MAX_CASES cases; None where the function takes or gives what no literal can say."""
    if "." in task.target_symbol:
        return None  # a method needs an object first
    spec = sandbox_spec(task, extra_lowers=(folder.gold_folder(task), folder.hidden_tests(task)))
    files = sorted({test.partition("::")[0] for test in task.fail_to_pass})
    with sandboxes.open(spec) as sandbox:
        done = sandbox.exec(
            ["python", "-c", RECORD, module, task.target_symbol, *files], timeout_s=task.verify_timeout_s
        )
    if done.outcome != "ok":
        return None
    try:
        answers = syntax.literal(done.stdout.decode().splitlines()[-1])
    except (ValueError, SyntaxError, IndexError):
        return None
    if len(answers) < 2:
        return None
    cases = draw.sample(answers, min(MAX_CASES, len(answers)))
    return TEST.format(module=module, name=task.target_symbol, cases=pformat(cases, width=100))
