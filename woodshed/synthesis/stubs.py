"""Code with the right names and no behaviour, and the hidden tests that pass with it.

Without a definition every test of a file that imports it fails; with an empty function of that name most of them may
pass again. Such tests ask for a name, and count for nothing. A stub is made from two texts of each file: the original,
and what the agent is shown. What is missing there comes back empty; what is there, if wrong, stays as it is there, with
the original's parameters. Constants that are missing come back as None.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from woodshed.pysource.edits import Edit, Source, apply, parse
from woodshed.synthesis.names import definitions
from woodshed.synthesis.operators.bodies import body_edit
from woodshed.synthesis.operators.deletion import Function, is_empty

KINDS = {
    "empty": "bodies that do nothing",
    "argument": "bodies that return their first argument",
    "raises": "bodies that raise NotImplementedError",
}
"""Kinds of stubs, in words."""
LITERAL = (
    *(ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.expr_context),
    *(ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.JoinedStr),
)
RETURN_NOTHING = ("__init__", "__init_subclass__", "__del__")


def stubs(
    original: Mapping[str, str | None], shown: Mapping[str, str | None]
) -> dict[str, dict[str, str | None]]:
    """Text of every file that gets something back, by kind of stub.

    Args:
        original: text of the files that the solution changes; None for one that it deletes.
        shown: text of the same files as the agent sees them; None for one that is not there.
    """
    by_kind: dict[str, dict[str, str | None]] = {}
    for kind in KINDS:
        texts = {path: _restored(text, shown.get(path), kind) for path, text in original.items()}
        changed: dict[str, str | None] = {p: t for p, t in texts.items() if t not in (None, shown.get(p))}
        if changed:
            by_kind[kind] = changed
    return by_kind


def idle(stub_passes: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Tests that any body satisfies, if only it returns. A predicate's tests pass with one such body, not with each."""
    passing = [frozenset(tests) for kind, tests in stub_passes.items() if kind != "raises"]
    return frozenset.intersection(*passing) if passing else frozenset()


def _restored(original: str | None, shown: str | None, kind: str) -> str | None:
    """A file with the names that are missing; as it is shown where none is."""
    source, remaining = parse(original or ""), parse(shown or "")
    if not original or source is None or remaining is None:
        return shown
    names, edits = _definitions(source, remaining, kind)
    constants = list(_constants(source.tree.body, remaining.tree.body, source))
    if not names and not constants:
        return shown
    text = apply(source.text, [*edits, *constants])
    return shown if parse(text) is None else text


def _definitions(source: Source, remaining: Source, kind: str) -> tuple[set[str], list[Edit]]:
    """Names that come back, and the edits that make the original text the stub."""
    shown_definitions: dict[str, list[Function | ast.ClassDef]] = {}
    for name, node in definitions(remaining.tree.body):
        shown_definitions.setdefault(name, []).append(node)
    names: set[str] = set()
    edits: list[Edit] = []
    for name, node in definitions(source.tree.body):
        twins = [twin for twin in shown_definitions.get(name, []) if type(twin) is type(node)]
        if any(remaining.segment(twin) == source.segment(node) for twin in twins):
            continue
        if isinstance(node, ast.ClassDef):
            names |= set() if twins else {name}
            if twins:
                edits.append(
                    Edit(
                        *_decorators(source, node), remaining.text[slice(*_decorators(remaining, twins[-1]))]
                    )
                )
            continue
        twin = twins[-1] if twins else None
        if isinstance(twin, Function) and not is_empty(twin):
            changed = ast.dump(twin.args) != ast.dump(node.args)
            names |= {name} if changed else set()
            edits.append(Edit(*source.span(node), _as_shown(source, node, remaining, twin, changed)))
        elif not is_empty(node):
            names.add(name)
            edits.append(body_edit(source, node, name, line=_line(node, kind)))
    return names, edits


def _decorators(source: Source, node: Function | ast.ClassDef) -> tuple[int, int]:
    return source.span(node)[0], source.offset(node.lineno, node.col_offset)


def _as_shown(source: Source, node: Function, remaining: Source, twin: Function, changed: bool) -> str:
    """A function as the agent sees it, with the original's parameters where they differ."""
    if not changed:
        return remaining.segment(twin)
    header = source.text[source.span(node)[0] : source.span(node.body[0])[0]]
    return header + remaining.text[remaining.span(twin.body[0])[0] : remaining.span(twin)[1]]


def _line(function: Function, kind: str) -> str:
    """The one line of a body."""
    if kind == "raises":
        return ""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    receivers = [name for name in names if name in ("self", "cls")]
    others = [a for a in (arguments.vararg, *arguments.kwonlyargs, arguments.kwarg) if a]
    ordered = [*(name for name in names if name not in receivers), *(a.arg for a in others), *receivers]
    if function.name in RETURN_NOTHING:
        return "return None"
    if function.name == "__new__" and names:
        return f"return super().__new__({names[0]})"
    value = ordered[0] if kind == "argument" and ordered else ""
    if not _yields(function):
        return f"return {value or None}"
    manages = any("contextmanager" in ast.dump(decorator) for decorator in function.decorator_list)
    return f"yield {value}".strip() if value or manages else "return; yield"


def _yields(function: Function) -> bool:
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return False


def _constants(body: list[ast.stmt], remaining: list[ast.stmt], source: Source) -> Iterator[Edit]:
    """Literal values of names that are missing become None, in the module and in its classes."""
    bound = {name for node in remaining for name in _bound(node)}
    classes = {node.name: node.body for node in remaining if isinstance(node, ast.ClassDef)}
    for node in body:
        if isinstance(node, ast.ClassDef) and not any("Enum" in ast.dump(base) for base in node.bases):
            yield from _constants(node.body, classes.get(node.name, []), source)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        names = _bound(node)
        if value is None or not names or bound & set(names) or any(n.startswith("__") for n in names):
            continue
        if all(isinstance(part, LITERAL) for part in ast.walk(value)):
            yield Edit(*source.span(value), "None")


def _bound(node: ast.stmt) -> list[str]:
    """Names that an assignment of a module or class binds, where it binds nothing else."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return names if len(names) == len(targets) else []
