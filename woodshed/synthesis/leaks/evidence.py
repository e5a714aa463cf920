"""Secrets of a task: the code that it took away and the tests that it hides, read from its folder alone.

Whatever operator made the task, the evidence is what the gold patch has and the workspace has not: whole functions,
or the runs of tokens that are missing from one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

from woodshed.pysource import syntax
from woodshed.records import Task
from woodshed.synthesis.leaks import fingerprints
from woodshed.synthesis.leaks.fingerprints import Body, Function
from woodshed.tasks import folder

MIN_FRAGMENT = 16
"""Tokens of a missing part that is no whole body; shorter ones are idioms of everybody."""
AROUND = 11
"""Tokens on either side that a short missing part is looked for with: an old copy has them in one run, the workspace
has them torn apart. With more, what is left would be most of it (`fingerprints.Runs`)."""
OWN_PARAMETERS = ("__init__", "__new__", "__call__")
"""Methods of protocols whose parameters are up to the class; of the others everybody knows them."""
MIN_TEST = 30
MIN_SHAPE = 30
"""Nodes of a syntax tree whose shape says something."""


def bodies(task: Task) -> list[Body]:
    """Everything that the task's folder must not show to an attempt."""
    workspace = folder.workspace(task)
    all_bodies: list[Body] = []
    for path, text in folder.gold_patch(task).files.items():
        shown = _text(workspace / path)
        if text is not None and path.endswith((".py", ".pyi")):
            all_bodies += _missing_code(task, path, text, shown)
        elif text is not None:
            all_bodies += _missing_lines(task, text, shown)
    tiny = [body for body in all_bodies if len(body.tokens) < MIN_FRAGMENT]
    if len(tiny) < len(all_bodies):  # then each of them is an idiom
        all_bodies = [replace(b, tokens=(), words=()) if b in tiny else b for b in all_bodies]
        if sum(len(b.tokens) for b in tiny) >= sum(len(b.tokens) for b in all_bodies):  # but not all together
            tokens = tuple(fingerprints.code_words("".join(body.source for body in tiny)))
            all_bodies.append(Body(task.name, "", "gold", tokens, words=_anchors(tokens)))
    for _, function, text in _hidden_tests(task):
        tokens = tuple(fingerprints.code_words(_source(text, function.body)))
        if len(tokens) >= MIN_TEST:
            all_bodies.append(Body(task.name, function.name, "test", tokens, words=_anchors(tokens)))
    return all_bodies


def functions(path: str, text: str) -> list[Body]:
    """Every function of a file that is more than an idiom, as if all of the file were missing."""
    tree = _parsed(text)
    large_functions = []
    for name, function in fingerprints.functions(tree or ast.Module([], [])):
        tokens = fingerprints.code_words(_source(text, fingerprints.code_body(function)))
        if len(tokens) >= MIN_FRAGMENT:
            body = _whole("", "", (path, name), text, function, tuple(tokens))
            large_functions.append(replace(body, called=""))  # its signature is nobody's question
    return large_functions


def missing(before: str, after: str) -> list[str]:
    """Dotted names of the functions of one text that are missing as a whole from another."""
    remaining = list(fingerprints.functions(_parsed(after) or ast.Module([], [])))
    intact, visible = {ast.dump(function) for _, function in remaining}, dict(remaining)
    return [
        name
        for name, function in fingerprints.functions(_parsed(before) or ast.Module([], []))
        if ast.dump(function) not in intact
        and _is_whole(*_tokens(before, function, after, visible.get(name)))
    ]


def hidden_names(task: Task, known: Iterable[Body]) -> list[str]:
    """Names of hidden tests and of removed functions, which no leftover may mention."""
    tests = {name.rpartition(".")[2] for name, _, _ in _hidden_tests(task)}
    removed = {body.name for body in known if body.kind == "gold" and body.source and task.level >= 2}
    return sorted(name for name in tests | removed if len(name) > 3)


def _missing_code(task: Task, path: str, text: str, shown: str) -> Iterator[Body]:
    tree, remaining = _parsed(text), _parsed(shown) or ast.Module([], [])
    if tree is None:
        yield from _missing_lines(task, text, shown)
        return
    shown_functions = list(fingerprints.functions(remaining))
    intact = {ast.dump(function) for _, function in shown_functions}
    visible = dict(shown_functions)
    missing_functions: list[str] = []
    changed: list[str] = []
    for name, function in fingerprints.functions(tree):
        if ast.dump(function) in intact:
            continue  # a name may be defined twice, under `if`
        if any(name.startswith(f"{outer}.") for outer in missing_functions):
            continue  # inside of a function that is missing as a whole
        shown_function = visible.get(name)
        before, tokens = _tokens(text, function, shown, shown_function)
        if _is_whole(before, tokens):
            missing_functions.append(name)
            body = _whole(task.name, task.instruction, (path, name), text, function, tuple(tokens))
            shows = (
                shown_function is not None and fingerprints.parameters(shown_function) == body.parameters
            )  # what is left of a body
            yield replace(body, stated=body.stated or shows)
        else:
            short = name.rpartition(".")[2]
            changed.append(name)
            anchors = _anchors(tokens)  # a copy holds all of it
            for run in _missing_parts(before, tokens):
                yield Body(task.name, short, "gold", tuple(run), words=anchors)
    yield from _missing_statements(
        task, text, tree, shown, remaining, alone=not missing_functions and not changed
    )


def _tokens(text: str, function: Function, shown: str, other: Function | None) -> tuple[list[str], list[str]]:
    """Tokens of the rest of a function and of the function: of the bodies, or of everything if these are equal."""
    tokens = fingerprints.code_words(_source(text, fingerprints.code_body(function)))
    before = fingerprints.code_words(_source(shown, fingerprints.code_body(other))) if other else []
    if other and tokens == before:  # a decorator, a parameter
        return fingerprints.code_words(_source(shown, [other])), fingerprints.code_words(
            _source(text, [function])
        )
    return before, tokens


def _is_whole(before: list[str], tokens: list[str]) -> bool:
    return sum(map(len, _missing_runs(before, tokens))) >= 0.8 * len(tokens)


def _whole(
    task: str,
    instruction: str,
    location: tuple[str, str],
    text: str,
    function: Function,
    tokens: tuple[str, ...],
) -> Body:
    body = fingerprints.code_body(function)
    shape, nodes = fingerprints.shape(body)
    parameters = fingerprints.parameters(function)
    stated_words = set(re.findall(r"\w+", instruction))
    owner = location[1].rpartition(".")[0].rpartition(".")[2]
    called = owner if function.name in OWN_PARAMETERS and owner else function.name
    is_known = called.startswith("__") or (called == owner and set(parameters) <= fingerprints.COMMON)
    return Body(
        task=task,
        name=function.name,
        kind="gold",
        tokens=tokens,
        parameters=parameters,
        shape=shape if nodes >= MIN_SHAPE else "",
        outline=fingerprints.outline(body),
        marks=fingerprints.marks(body),
        names=fingerprints.names(body),
        source=_source(text, [function]),
        place=location,
        called=called,
        stated={called, *parameters} <= stated_words or is_known,
        words=_anchors(tokens),
    )


def _missing_statements(
    task: Task, text: str, tree: ast.Module, shown: str, remaining: ast.Module, *, alone: bool
) -> Iterator[Body]:
    """Tables, constants and the like at the top of a module or class, or what is missing from those that are left.

    An entry that went with the function it names gives nothing away; where nothing else is missing (`alone`) it is
    what the task asks for.
    """
    present = {ast.dump(node) for node in _plain(remaining)}
    visible = {_assigned(node): node for node in _plain(remaining)}
    for node in _plain(tree):
        if ast.dump(node) in present:
            continue
        shown_node = visible.get(_assigned(node))
        before = fingerprints.code_words(_source(shown, [shown_node])) if shown_node else []
        tokens = fingerprints.code_words(_source(text, [node]))
        for run in (_missing_parts if alone and shown_node else _missing_runs)(before, tokens):
            if len(run) >= 2 * MIN_FRAGMENT or (alone and shown_node):
                yield Body(task.name, "", "gold", tuple(run), words=_anchors(tokens))


def _assigned(node: ast.Assign | ast.AnnAssign) -> str:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return ", ".join(map(ast.unparse, targets))


def _plain(tree: ast.AST) -> Iterator[ast.Assign | ast.AnnAssign]:
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.ClassDef):
            yield from _plain(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield node


def _missing_lines(task: Task, text: str, shown: str) -> Iterator[Body]:
    for run in _missing_runs(fingerprints.words(shown), fingerprints.words(text)):
        if len(run) >= MIN_FRAGMENT:
            yield Body(task.name, "", "gold", tuple(run), words=_anchors(run))


def _missing_runs(before: list[str], after: list[str]) -> list[list[str]]:
    return [after[begin:end] for begin, end in _gaps(before, after) if begin < end]


def _missing_parts(before: list[str], after: list[str]) -> list[list[str]]:
    """The long missing runs; where there is none, the short ones with what stands around them."""
    long = [run for run in _missing_runs(before, after) if len(run) >= MIN_FRAGMENT]
    return long or [after[max(0, begin - AROUND) : end + AROUND] for begin, end in _gaps(before, after)]


def _gaps(before: list[str], after: list[str]) -> list[tuple[int, int]]:
    """Spans of `after` that lack something of `before`, or (an empty span) have something inserted."""
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    return [(begin, end) for kind, _, _, begin, end in matcher.get_opcodes() if kind != "equal"]


def _hidden_tests(task: Task) -> Iterator[tuple[str, Function, str]]:
    """Dotted name, node and file text of every test function that the workspace does not show."""
    workspace = folder.workspace(task)
    for path, data in folder.protected_files(task).items():
        text, shown = syntax.legible(data), _text(workspace / path)
        tree = _parsed(text) if path.endswith(".py") and text != shown else None
        if tree is None:
            continue
        visible = {name for name, _ in fingerprints.functions(_parsed(shown) or ast.Module([], []))}
        for name, function in fingerprints.functions(tree):
            if name not in visible and function.name.startswith("test"):
                yield name, function, text


def _source(text: str, statements: list[ast.stmt] | list[Function]) -> str:
    """The lines of statements, without their common indentation."""
    if not statements:
        return ""
    first = min([statements[0].lineno, *(d.lineno for d in getattr(statements[0], "decorator_list", ()))])
    last = statements[-1].end_lineno or first
    lines = syntax.plain(text).split("\n")[first - 1 : last]
    lines[0] = " " * statements[0].col_offset + lines[0].encode()[statements[0].col_offset :].decode(
        errors="ignore"
    )
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[margin:] for line in lines) + "\n"


def _anchors(tokens: Iterable[str]) -> tuple[str, ...]:
    """The longest words of a body, up to six."""
    words = {token for token in tokens if len(token) > 3 and token not in fingerprints.COMMON}
    return tuple(sorted(words, key=lambda word: (-len(word), word))[:6])


def _parsed(text: str) -> ast.Module | None:
    try:
        return syntax.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _text(path: Path) -> str:
    return syntax.legible(path.read_bytes()) if path.is_file() else ""
