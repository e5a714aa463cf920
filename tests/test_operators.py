"""Deletion operators, mutations, the reference graph and instructions, on small texts that need no sandbox."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import replace
from typing import Any

import pytest

from woodshed.pysource.edits import apply, parse
from woodshed.synthesis import coverage_map, discovery, instructions, operators
from woodshed.synthesis.coverage_map import Map
from woodshed.synthesis.mutations import distinct, mutants
from woodshed.synthesis.names import Codebase, unresolved
from woodshed.synthesis.operators import CascadeError, Deletion, Symbol, every_symbol
from woodshed.synthesis.operators.deletion import find_function
from woodshed.synthesis.operators.parts import branches, optional_parameters, registrations


def codebase(**files: str) -> Codebase:
    """A package `pkg` with these modules."""
    texts = {f"pkg/{name}.py": textwrap.dedent(text).lstrip("\n") for name, text in files.items()}
    return Codebase({path.replace("__DOT__", "/"): text for path, text in texts.items()}, ["."])


def symbol(code: Codebase, name: str, **changes: Any) -> Symbol:
    return replace(next(s for s in every_symbol(code) if s.name == name), **changes)


def run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "m", "exec"), names)
    return names


ANIMALS = '''
    """Animals."""
    import argparse
    import functools

    SOUNDS = {"dog": lambda: "woof",  # loud
              "cat": lambda: "meow",
              "cow": lambda: "moo"}


    def _twice(text):
        return text + text


    def _shout(text):
        return _twice(text).upper()


    def call(name, *, loud=False, times=None):
        """Calls an animal.

        Args:
            name: who.
            loud: in capitals,
                twice as well.
            times: how often.
        """
        text = SOUNDS[name]()  # what it says
        if loud:
            text = _shout(text)
        elif times is not None and times > 1:
            # several
            text = " ".join([text] * times)
        else:
            text = text.strip()
        return text


    @functools.lru_cache
    def first(names, default=None):
        """The first of some names."""
        if not names:
            return default
        return names[0]


    class Cage:
        """Holds animals."""

        size = 3

        def __init__(self):
            self.inside = []

        def add(self, name):
            """One more."""
            if len(self.inside) >= self.size:
                raise ValueError("full")
            self.inside.append(name)

        def count(self):
            return len(self.inside)
'''


def test_stub_bare_takes_the_docstring_too():
    code = codebase(animals=ANIMALS)
    text = operators.OPERATORS["stub_bare"](code, symbol(code, "first"), 0).changed["pkg/animals.py"] or ""
    assert 'def first(names, default=None):\n    raise NotImplementedError("first")\n\n\nclass Cage' in text
    with pytest.raises(CascadeError, match="no docstring"):
        operators.OPERATORS["stub_bare"](code, symbol(code, "_twice"), 0)


def test_a_gutted_class_keeps_its_interface():
    code = codebase(animals=ANIMALS)
    deletion = operators.OPERATORS["gut_class"](code, symbol(code, "Cage"), 0)
    cage = run(deletion.changed["pkg/animals.py"] or "")["Cage"]
    assert cage.add.__doc__ == "One more." and cage.size == 3 and cage().inside == []
    for method, arguments in (("add", ["a"]), ("count", [])):
        with pytest.raises(NotImplementedError, match=f"Cage.{method}"):
            getattr(cage(), method)(*arguments)
    assert deletion.gap[0] < deletion.gap[1] and not deletion.removed


def test_helpers_go_with_the_function_that_alone_uses_them():
    code = codebase(animals=ANIMALS)
    helpers = tuple(symbol(code, name) for name in ("_shout", "_twice"))
    deletion = operators.OPERATORS["remove_helpers"](code, symbol(code, "call", parts=helpers), 0)
    text = deletion.changed["pkg/animals.py"] or ""
    assert "_shout" not in text and "_twice" not in text and 'NotImplementedError("call")' in text
    assert text.split("\n")[deletion.gap[0] - 1] == '    raise NotImplementedError("call")'


def test_a_cluster_and_a_class_go_whole():
    code = codebase(
        animals=ANIMALS, __init__="from .animals import Cage, call, first\n__all__ = ['Cage', 'call']\n"
    )
    parts = tuple(symbol(code, name) for name in ("call", "first"))
    cluster = operators.OPERATORS["remove_cluster"](code, symbol(code, "call", parts=parts), 0)
    assert cluster.changed["pkg/__init__.py"] == "from .animals import Cage\n__all__ = ['Cage']\n"
    assert {t.name for t in cluster.targets} == {"call", "first"} and cluster.level == 3
    gone = operators.OPERATORS["remove_class"](code, symbol(code, "Cage"), 0)
    assert gone.changed["pkg/__init__.py"] == "from .animals import call, first\n__all__ = ['call']\n"
    assert "Cage" not in (gone.changed["pkg/animals.py"] or "")


def test_a_module_goes_with_its_exports():
    code = codebase(
        __init__="from .one import *\nfrom . import one, two\nfrom .two import b\n__all__ = ['a', 'b']\n",
        one="__all__ = ['a']\ndef a():\n    return 1\nlimit = 2\n",
        two="import pkg.one, os\nfrom pkg import one as first\ndef b():\n    return first.a()\nc = first.limit\n",
        three="from .one import a\ndef late():\n    from .one import a\n    return a\n",
    )
    module = Symbol("pkg/one.py", "one", "pkg.one", "", "", 2, (1, 4), "module")
    deletion = operators.OPERATORS["remove_module"](code, module, 1)
    assert deletion.changed == {
        "pkg/__init__.py": "from . import two\nfrom .two import b\n__all__ = ['b']\n",
        "pkg/one.py": None,
        "pkg/two.py": "import os\ndef b():\n    return first.a()\n",
        "pkg/three.py": "def late():\n    from .one import a\n    return a\n",
    }
    assert list(deletion.absent) == ["pkg/one.py"] and "pkg/one.py" not in deletion.code.texts
    assert {"one", "a"} <= deletion.words
    with pytest.raises(CascadeError):
        operators.OPERATORS["remove_module"](code, module, 0)


def test_a_sub_package_goes_with_every_module_in_it():
    code = codebase(
        __init__="import pkg.sub.deep\nfrom .sub import x\n",
        sub__DOT____init__="from .deep import x\n",
        sub__DOT__deep="x = 1\n",
    )
    package = Symbol("pkg/sub/__init__.py", "sub", "pkg.sub", "", "", 2, (1, 1), "package")
    deletion = operators.OPERATORS["remove_package"](code, package, 4)
    assert deletion.changed == {"pkg/__init__.py": "", "pkg/sub/__init__.py": None, "pkg/sub/deep.py": None}


COMMANDS = """
    import argparse


    def compare(args):
        return _order(args.a) < 1


    def check(args):
        return args.a


    def _order(text):
        return len(text)


    def build():
        parser = argparse.ArgumentParser()
        parsers = parser.add_subparsers()
        # compare
        one = parsers.add_parser("compare", help="x")
        one.set_defaults(func=compare)
        one.add_argument("a")
        inner = one.add_subparsers()
        deep = inner.add_parser("deep")
        for each in (one, deep):
            each.add_argument("b")
        two = parsers.add_parser("check")
        two.set_defaults(func=check)
        two.add_argument("a")
        return parser
"""


def test_a_sub_command_goes_with_its_handler_and_helpers():
    code = codebase(cli=COMMANDS)
    command = symbol(code, "compare", kind="command", detail="compare", parts=(symbol(code, "_order"),))
    text = operators.OPERATORS["remove_command"](code, command, 0).changed["pkg/cli.py"] or ""
    assert "_order" not in text and "one" not in text and "deep" not in text and '"compare"' not in text
    names = run(text)
    assert names["build"]().parse_args(["check", "x"]).func is names["check"]
    with pytest.raises(SystemExit):
        names["build"]().parse_args(["compare", "x"])


def test_registrations_are_decorators_entries_and_calls():
    text = textwrap.dedent(ANIMALS) + "\nregistry.register('a', call)\n"
    source = parse(text)
    assert source is not None
    found = {(name, what): apply(text, edits) for name, what, edits in registrations(source)}
    assert set(found) == {
        ("first", "@functools.lru_cache"),
        ("SOUNDS", '"dog"'),
        ("SOUNDS", '"cat"'),
        ("SOUNDS", '"cow"'),
        ("call", "registry.register('a', call)"),
    }
    assert "lru_cache" not in found["first", "@functools.lru_cache"]
    cat = found["SOUNDS", '"cat"'].replace("registry.register('a', call)\n", "")
    assert list(run(cat)["SOUNDS"]) == ["dog", "cow"] and "# loud" in cat
    code = codebase(animals=ANIMALS)
    part = Symbol("pkg/animals.py", "SOUNDS", "pkg.animals", "", "", 1, (5, 5), "registration", '"cat"')
    assert operators.OPERATORS["unregister"](code, part, 0).marker == "cat"


def test_a_parameter_goes_with_its_branches_and_documentation():
    code = codebase(animals=ANIMALS)
    function = symbol(code, "call")
    source = code.modules["pkg/animals.py"].source
    assert set(optional_parameters(source, find_function(source, "call"))) == {"loud", "times"}
    loud = operators.OPERATORS["remove_parameter"](code, replace(function, detail="loud"), 0)
    text = loud.changed["pkg/animals.py"] or ""
    assert "def call(name, *, times=None):" in text and "loud" not in text.replace("# loud", "")
    assert "in capitals" not in text and "twice as well" not in text and "times: how often." in text
    call = run(text)["call"]
    assert call("cat") == "meow" and call("cat", times=2) == "meow meow"
    with pytest.raises(TypeError, match="loud"):
        call("cat", loud=True)
    times = operators.OPERATORS["remove_parameter"](code, replace(function, detail="times"), 0)
    call = run(times.changed["pkg/animals.py"] or "")["call"]
    assert call("dog") == "woof" and call("dog", loud=True) == "WOOFWOOF"


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("def f(a, b=None):\n    return b or a\n", "b", "def f(a):\n    return None or a\n"),
        ("def f(\n    a,\n    b=1,\n):\n    return a + b\n", "b", "def f(\n    a,\n):\n    return a + 1\n"),
        ("def f(a, b=False):\n    return 1 if b else a\n", "b", "def f(a):\n    return a\n"),
        (
            "def f(a, b=True):\n    if b:\n        # why\n        a += 1\n        a += 2\n    return a\n",
            "b",
            "def f(a):\n    a += 1\n    a += 2\n    return a\n",
        ),
        (
            "def f(a, b=0):\n    if b:\n        a = b\n    return a\n",
            "b",
            "def f(a):\n    pass\n    return a\n",
        ),
    ],
)
def test_parameters_of_other_shapes(text: str, name: str, expected: str):
    code = Codebase({"m.py": text}, ["."])
    part = replace(next(operators.symbols(code)), detail=name)
    assert operators.OPERATORS["remove_parameter"](code, part, 0).changed == {"m.py": expected}


def test_parameters_that_cannot_go_are_not_offered():
    text = "def f(a=1, b=x, *, c=2):\n    c = 3\n    return a, b, c, [b for b in a]\ndef g(a=1):\n    return locals()\n"
    source = parse(text)
    assert source is not None
    assert [optional_parameters(source, find_function(source, name)) for name in "fg"] == [{}, {}]


BRANCHES = """
    def sort(x):
        if x < 0:
            return "small"
        if x == 0:
            kind = "zero"
        elif x == 1:
            kind = "one"
        elif x == 2:
            kind = "two"
        else:
            kind = "many"
        try:
            kind + ""
        except ValueError:
            kind = "bad"
        except TypeError:
            kind = "worse"
        match x:
            case 7:
                kind = "seven"
            case _:
                pass
        return kind
"""


def test_each_branch_goes_alone_and_the_rest_stays_right():
    code = codebase(m=BRANCHES)
    source = code.modules["pkg/m.py"].source
    found = branches(source, find_function(source, "sort"))
    conditions = [
        "x < 0",
        "x == 0",
        "x == 1",
        "x == 2",
        "except ValueError",
        "except TypeError",
        "case 7",
        "case _",
    ]
    assert [branch.condition for branch in found] == conditions
    right = {-1: "small", 0: "zero", 1: "one", 2: "two", 3: "many", 7: "seven"}
    lost = {0: -1, 1: 0, 2: 1, 3: 2, 6: 7}
    for index in range(len(found)):
        part = symbol(code, "sort", kind="branch", detail=str(index))
        deletion = operators.OPERATORS["remove_branch"](code, part, 0)
        sort = run(deletion.changed["pkg/m.py"] or "")["sort"]
        assert {x for x, kind in right.items() if sort(x) != kind} == (
            {lost[index]} if index in lost else set()
        )
    with pytest.raises(CascadeError, match="no branch '99'"):
        operators.OPERATORS["remove_branch"](code, replace(part, detail="99"), 0)


def test_mutants_are_one_edit_each_and_parse():
    text = textwrap.dedent(
        BRANCHES + "    \n    def g(a, b):\n        'Doc 1.'\n        raise ValueError(a + 1)\n"
    )
    source = parse(text)
    assert source is not None
    found = mutants(source, find_function(source, "sort"))
    assert {mutant.kind for mutant in found} >= {"comparison", "constant", "negation", "result", "arithmetic"}
    for mutant in found:
        changed = apply(text, [mutant.edit])
        assert changed != text and ast.parse(changed)
    assert mutants(source, find_function(source, "g")) == []
    text = "def f(a, b):\n    if a and not (\n        b or not(a)\n    ):\n        return not b\n"
    source = parse(text)
    assert source is not None
    found = mutants(source, find_function(source, "f"))
    assert sum(mutant.kind == "negation" for mutant in found) == 4
    assert all(ast.parse(apply(text, [mutant.edit])) for mutant in found)
    bug = replace(next(s for s in every_symbol(Codebase({"m.py": text}, ["."]))), detail="0")
    assert operators.OPERATORS["bug"](Codebase({"m.py": text}, ["."]), bug, 0).level == 0


def test_a_combination_is_its_parts_one_after_the_other():
    code = codebase(
        __init__="from .one import a\nfrom .two import b\n",
        one="def a():\n    return 1\n",
        two="def b():\n    return 2\n",
    )
    parts = (symbol(code, "a", detail="remove"), symbol(code, "b", detail="stub"))
    both = operators.OPERATORS["combine"](code, symbol(code, "a", kind="combination", parts=parts), 4)
    assert both.changed == {
        "pkg/__init__.py": "from .two import b\n",
        "pkg/one.py": "",
        "pkg/two.py": 'def b():\n    raise NotImplementedError("b")\n',
    }
    assert both.level == 5 and [t.name for t in both.targets] == ["a", "b"]
    twice = (symbol(code, "a", detail="remove"), symbol(code, "a", detail="stub"))
    with pytest.raises(CascadeError, match="different files"):
        operators.OPERATORS["combine"](code, symbol(code, "a", parts=twice), 4)


def test_every_operator_has_a_level_and_a_finder():
    assert set(operators.OPERATORS) == set(operators.LEVELS) == set(discovery.FINDERS) | {"combine"}


# ---- maps -------------------------------------------------------------------------------------------------


def test_references_and_domination():
    code = codebase(
        m="""
        def _a(): return _b()
        def _b(): return 1
        def _c(): return 2
        def f(): return _a() + _c()
        def g(): return _c()
        class K:
            def one(self): return self._two()
            def _two(self): return f
        """,
        n="from .m import f\nfrom . import m\ndef h(): return f() + m.g()\n",
    )
    graph = coverage_map.references(code)
    m, n = "pkg/m.py", "pkg/n.py"
    assert graph[m, "f"] == {(m, "_a"), (m, "_c")} and graph[n, "h"] == {(m, "f"), (m, "g")}
    assert graph[m, "K.one"] == {(m, "K._two")} and graph[m, "K._two"] == {(m, "f")}
    using = coverage_map.users(graph, Map((), {}, ((m, "g", m, "_b"),)))
    assert using[m, "_b"] == {(m, "_a"), (m, "g")}
    private = {(m, name) for name in ("_a", "_b", "_c")}
    assert coverage_map.dominated((m, "f"), coverage_map.users(graph, Map((), {})), private) == [
        (m, "_a"),
        (m, "_b"),
    ]
    assert coverage_map.dominated((m, "f"), using, private) == [(m, "_a")]


def test_sets_of_tests_leave_imports_out():
    tests = tuple(f"t::{i}" for i in range(3))
    found = Map(tests, {"m.py": {"1": "1", "2": "4", "3": "a"}})
    assert (
        found.covering("m.py", 1, 1) == coverage_map.AT_IMPORT
        and found.names(found.covering("m.py", 1, 1)) == []
    )
    assert found.names(found.covering("m.py", 2, 3)) == list(tests) and found.covering("x.py", 1, 9) == 0


def test_features_are_specific():
    code = codebase(animals=ANIMALS)
    tests = tuple(f"t::{i}" for i in range(10))
    lines = {str(n): "6" for n in range(*symbol(code, "call").lines)}  # tests 0 and 1
    lines |= {str(n): "7fe" for n in range(*symbol(code, "first").lines)}  # all of them
    survey = discovery.Survey(code, Map(tests, {"pkg/animals.py": lines}), 0.5, 60)
    found = {op: [f.symbol for f in discovery.discover(survey, op)] for op in discovery.FINDERS}
    assert [s.name for s in found["remove"]] == ["call"] and [s.name for s in found["stub"]] == ["call"]
    assert {s.detail for s in found["remove_parameter"]} == {"loud", "times"}
    assert [p.name for p in found["remove_helpers"][0].parts] == ["_twice", "_shout"]
    assert {s.detail for s in found["remove_branch"]} == {"0", "1"}


def test_unresolved_names():
    text = "import os\ndef f(a):\n    global made\n    made = a\n    return os, made, missing, len\n"
    text += "class C:\n    x = 1\n    y = x\n"
    assert unresolved(text) == {"missing"}
    assert unresolved("from x import *\nprint(y)\n") == frozenset()


# ---- instructions -----------------------------------------------------------------------------------------


def deletions() -> list[Deletion]:
    code = codebase(animals=ANIMALS, cli=COMMANDS)
    call, helper = symbol(code, "call"), symbol(code, "_shout")
    entry = Symbol("pkg/animals.py", "SOUNDS", "pkg.animals", "", "", 1, (5, 5), "registration", '"cat"')
    asked = {
        "stub": call,
        "stub_bare": call,
        "remove": call,
        "remove_class": symbol(code, "Cage"),
        "gut_class": symbol(code, "Cage"),
        "remove_cluster": replace(call, parts=(call, symbol(code, "first"))),
        "remove_helpers": replace(call, parts=(helper,)),
        "remove_command": symbol(code, "compare", detail="compare"),
        "remove_module": Symbol("pkg/cli.py", "cli", "pkg.cli", "", "", 2, (1, 4), "module"),
        "unregister": entry,
        "remove_parameter": replace(call, detail="loud"),
        "remove_branch": replace(call, detail="1"),
        "bug": replace(call, detail="0"),
        "combine": replace(
            call, parts=(replace(call, detail="remove"), symbol(code, "check", detail="stub"))
        ),
    }
    return [operators.OPERATORS[name](code, one, 4) for name, one in asked.items()]


@pytest.mark.parametrize("deletion", deletions(), ids=lambda deletion: deletion.operator)
def test_instructions_at_three_lengths(deletion: Deletion):
    needed = ["call"] if deletion.operator in ("remove", "combine") else []
    short, middle, full = (
        instructions.write(deletion, "pytest", length=length, needed=needed, behaviours=["loud calls"])
        for length in ("terse", "contextual", "full")
    )
    assert len(short) <= 201 and ".py" not in short and "/" not in short
    assert "pytest" in middle and deletion.symbol.path in middle + full
    assert "loud calls" in full and all(name in text for name in needed for text in (short, middle, full))
    if deletion.operator == "unregister":
        assert "cat" in short and "cat" in middle
    if deletion.operator == "remove_parameter":
        assert "`loud`" in short and "`loud`" in middle


def test_names_that_tests_need_are_said():
    code = codebase(animals=ANIMALS)
    deletion = operators.OPERATORS["remove_class"](code, symbol(code, "Cage"), 0)
    tests = [
        "from pkg.animals import Cage\ndef test_x():\n    c = Cage()\n    c.add(1)\n    assert c.inside\n"
    ]
    needed = instructions.needed_names(deletion, code, tests)
    assert needed == ["Cage", "add", "inside"]
    text = instructions.write(deletion, "pytest", needed=needed)
    assert "Names that the tests use: `add`, `inside`." in text
    with pytest.raises(instructions.TooLongError):
        instructions.write(deletion, "pytest", length="terse", needed=[f"name{i}" for i in range(60)])


def test_behaviours_come_from_names_and_expected_errors():
    text = "def test_call_empty():\n    with pytest.raises(KeyError):\n        call('')\ndef test_b(): pass\n"
    tests = ["t.py::test_call_empty[1]", "t.py::test_call_empty[2]", "t.py::test_b"]
    assert instructions.behaviours_of(tests, {"t.py": text}) == ["call empty (expects KeyError)", "b"]


def test_two_ways_to_write_one_bug_are_one():
    text = "class C:\n    def g(self, d, k):\n        if k in d:\n            return 1\n        return k is None\n"
    source = parse(text)
    assert source is not None
    function = find_function(source, "C.g")
    found = list(enumerate(mutants(source, function)))
    ways = [number for number, mutant in found if mutant.edit.text in ("not in", "not (k in d)")]
    assert len(ways) == 2 and len(found) > 3
    assert [number for number, _ in distinct(source, function, found)] == [
        number for number, _ in found if number != ways[1]
    ]
