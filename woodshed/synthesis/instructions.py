"""Instructions from templates: three lengths, and every name that the hidden tests need.

full        signatures, whole docstrings, what the hidden tests look at, and everything else to restore
contextual  the place, the signature, the first paragraph of the docstring, what else to restore; few words, because
            a small model reads them at every turn
terse       at most 200 characters and no file names, the way a colleague types it
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from woodshed.pysource.edits import parse
from woodshed.records import TaskError
from woodshed.synthesis.closure import Trace
from woodshed.synthesis.names import Codebase, dotted_parts
from woodshed.synthesis.operators import Deletion, Symbol, is_public

Length = Literal["full", "contextual", "terse"]
TERSE_CHARS = 200
MAX_TARGETS = 8
"""Most targets whose signatures a contextual instruction shows."""
MAX_BEHAVIOURS = 12


class TooLongError(TaskError):
    """The required text does not fit."""


def write(
    deletion: Deletion,
    test_command: str,
    *,
    length: Length = "contextual",
    max_words: int = 90,
    needed: Sequence[str] = (),
    behaviours: Sequence[str] = (),
) -> str:
    """The instruction, in Markdown.

    Args:
        max_words: of a contextual one, per definition that is missing; docstrings are cut first.
        needed: names that the hidden tests use and the deletion took (`needed_names`).
        behaviours: what the hidden tests look at (`behaviours_of`), for a full one.

    Raises:
        TooLongError: it does not fit without any docstring either.
    """
    if length == "terse":
        return _terse(deletion, needed)
    if length == "full":
        return _full(deletion, test_command, needed, behaviours)
    return _contextual(deletion, test_command, max_words, needed)


# ---- the three lengths ------------------------------------------------------------------------------------


def _contextual(deletion: Deletion, command: str, max_words: int, needed: Sequence[str]) -> str:
    shown = _shown(deletion)
    parts = [_opening(deletion), *_signatures(shown[:MAX_TARGETS])]
    parts += _restore(deletion)
    parts += _names(needed, "\n".join(parts))
    parts.append(f"Hidden tests decide. Run the visible ones: `{command}`")
    words, allowed = (
        sum(len(part.split()) for part in parts),
        max_words * max(1, min(len(shown), MAX_TARGETS)),
    )
    if words > allowed:
        raise TooLongError(f"{words} words without a docstring, {allowed} allowed")
    paragraph = re.split(r"\n\s*\n", _docstring(deletion).strip())[0].split()
    room = max_words - words
    if len(paragraph) > room:
        paragraph = [*paragraph[: max(room - 1, 0)], "..."] if room > 3 else []
    if paragraph:
        parts.insert(2 if shown else 1, " ".join(paragraph))
    return "\n\n".join(parts) + "\n"


def _full(deletion: Deletion, command: str, needed: Sequence[str], behaviours: Sequence[str]) -> str:
    parts = [_opening(deletion)]
    for target in _shown(deletion):
        parts += [*_signatures([target]), *([target.docstring.strip()] if target.docstring else [])]
    if not _shown(deletion) and deletion.symbol.docstring:
        parts.append(deletion.symbol.docstring.strip())
    parts += _restore(deletion)
    if behaviours:
        parts.append("The hidden tests look at:\n" + "\n".join(f"- {line}" for line in behaviours))
    parts += _names(needed, "\n".join(parts))
    parts.append(f"Hidden tests decide. Run the visible ones: `{command}`")
    return "\n\n".join(parts) + "\n"


def _terse(deletion: Deletion, needed: Sequence[str]) -> str:
    symbol = deletion.symbol
    package = symbol.module.partition(".")[0]
    text = TERSE[deletion.operator].format(
        name=_called(symbol),
        package=package,
        detail=_detail(deletion),
        names=", ".join(f"`{t.name}`" for t in _shown(deletion)),
    )
    missing = [name for name in needed if not _mentions(text, name)]
    text += f" It needs {', '.join(f'`{name}`' for name in missing)}." if missing else ""
    if len(text) > TERSE_CHARS:
        raise TooLongError(f"{len(text)} characters, {TERSE_CHARS} allowed")
    return text + "\n"


TERSE = {
    "stub": "`{name}` in {package} isn't implemented, it just raises. Can you write it?",
    "stub_bare": "`{name}` in {package} isn't implemented, it just raises. Can you write it?",
    "gut_class": "The methods of `{name}` in {package} are all empty, please fill them in.",
    "remove": "`{name}` is gone from {package}, please bring it back.",
    "remove_class": "The class `{name}` is gone from {package}, please bring it back.",
    "remove_cluster": "{names} are gone from {package}, please bring them back.",
    "remove_helpers": "`{name}` in {package} just raises, and its helpers are gone. Can you write it again?",
    "remove_command": "The `{detail}` command of {package} is gone (`{name}`), please bring it back.",
    "remove_module": "We lost the whole module `{name}` of {package}, with {names}. Please write it again.",
    "remove_package": "We lost the whole sub-package `{name}` of {package}. Please write it again.",
    "unregister": "`{name}` in {package} lost its {detail}, please put it back.",
    "remove_parameter": "`{name}` in {package} should take `{detail}` again.",
    "remove_branch": "`{name}` in {package} doesn't handle one of its cases any more: {detail}.",
    "bug": "`{name}` in {package} is wrong since the last change. Can you find out why and fix it?",
    "revert": "{detail}",
    "combine": "{names} are gone from {package} or don't work any more, please bring them back.",
}


# ---- what must be said ------------------------------------------------------------------------------------


def needed_names(deletion: Deletion, code: Codebase, tests: Iterable[str]) -> list[str]:
    """Names that the texts of the failing tests use and that the deletion took: removed definitions, the methods
    and attributes of removed classes, modules, parameters.

    Args:
        code: the code base before the deletion.
        tests: texts of the test files with a fail-to-pass test.
    """
    words = {word for text in tests for word in re.findall(r"\w+", text)}
    dotted = {word for text in tests for word in re.findall(r"\.(\w+)", text)}
    taken = {name.rpartition(".")[2] for _, name in deletion.removed} & words
    if deletion.operator == "remove_parameter":
        taken.add(deletion.symbol.detail)
    for path, name in deletion.removed:
        if path in code.modules:
            taken |= _members(code.modules[path].source.tree, name) & dotted
    taken |= {path.rpartition("/")[2].removesuffix(".py") for path in deletion.absent} & words
    return sorted(name for name in taken if name.isidentifier() and not name.endswith("__"))


def _members(tree: ast.Module, name: str) -> set[str]:
    """Methods, class attributes and instance attributes of a top-level class; nothing for anything else."""
    members: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for inner in ast.walk(node):
                match inner:
                    case ast.FunctionDef(name=member) | ast.AsyncFunctionDef(name=member):
                        members.add(member)
                    case ast.Attribute(value=ast.Name(id="self"), attr=member, ctx=ast.Store()):
                        members.add(member)
                    case ast.Name(id=member, ctx=ast.Store()) if inner in ast.walk(node):
                        members.add(member)
    return {member for member in members if not member.startswith("_")}


def behaviours_of(tests: Sequence[str], texts: Mapping[str, str]) -> list[str]:
    """Behaviours that failing tests check, in words: their names, and the errors that they expect."""
    behaviours: dict[str, None] = {}
    for test in tests:
        path, _, inner = test.partition("::")
        name = inner.partition("[")[0].rpartition("::")[2]
        words = " ".join(re.sub(r"^test_?", "", name).replace("_", " ").split())
        errors = _expected_errors(texts.get(path, ""), name)
        if words:
            behaviours[words + (f" (expects {', '.join(errors)})" if errors else "")] = None
    return list(behaviours)[:MAX_BEHAVIOURS]


def _expected_errors(text: str, name: str) -> list[str]:
    source = parse(text)
    errors: set[str] = set()
    for node in ast.walk(source.tree) if source else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and call.args:
                    function = (dotted_parts(call.func) or [""])[-1]
                    if function in ("raises", "assertRaises", "assertRaisesRegex"):
                        errors |= {".".join(dotted_parts(call.args[0]) or [])}
    return sorted(errors - {""})


# ---- parts ------------------------------------------------------------------------------------------------


def _opening(deletion: Deletion) -> str:
    if deletion.operator == "combine":
        lines = []
        for part in deletion.symbol.parts:
            operator, _, detail = part.detail.partition(" ")
            lines.append(f"- {_sentence(operator, part, detail, None)}")
        return "Several things are to be done:\n" + "\n".join(lines)
    return _sentence(deletion.operator, deletion.symbol, _detail(deletion), deletion.gap)


def _sentence(operator: str, symbol: Symbol, detail: str, gap: tuple[int, int] | None) -> str:
    name, path = f"`{symbol.name}`", symbol.path
    kind = "method" if "." in symbol.name else "function"
    before = f", before line {gap[0]}" if gap else ""
    line = f"line {gap[0]}" if gap else "it"
    match operator:
        case "stub" | "stub_bare":
            return f"Implement {name} in {path}: {line} only raises NotImplementedError."
        case "gut_class":
            where = f", lines {gap[0]} to {gap[1]}" if gap else ""
            return f"Implement the methods of {name} in {path}{where}: they only raise NotImplementedError."
        case "remove":
            return f"Add the missing {kind} {name} to {path}{before}."
        case "remove_class":
            return f"Add the missing class {name} to {path}{before}."
        case "remove_cluster":
            names = ", ".join(f"`{part.name}`" for part in symbol.parts)
            return f"Add the missing {names} to {path}."
        case "remove_helpers":
            return (
                f"Implement {name} in {path}: {line} only raises NotImplementedError, and the private helpers "
                "that it used are gone."
            )
        case "remove_command":
            return f"Add the missing command `{detail}` to {path}; its handler is {name}."
        case "remove_module" | "remove_package":
            what = f"`{symbol.module}`"
            return f"Write {what} again: {path if operator == 'remove_module' else path.rpartition('/')[0]} is gone."
        case "unregister":
            return f"{name} in {path} has lost its {detail}: put it back{before}."
        case "remove_parameter":
            return f"Give {name} in {path} its optional parameter `{detail}` again."
        case "remove_branch":
            near = f" (near line {gap[0]})" if gap else ""
            return f"{name} in {path} no longer handles one of its cases{near}: {detail}."
        case "revert":
            return detail
        case "bug":
            return f"{name} in {path} gives wrong results. Find the bug and fix it."
    raise AssertionError(operator)


def _detail(deletion: Deletion) -> str:
    """The missing part of the symbol, as a phrase."""
    symbol, traces = deletion.symbol, deletion.traces
    match deletion.operator:
        case "unregister":
            what = f"`{' '.join(symbol.detail.split())}`"
            return f"decorator {what}" if symbol.detail.startswith("@") else f"entry {what}"
        case "remove_branch":
            return f"`{' '.join(traces[0].what.split())}`"
        case "remove_command":
            return symbol.detail or symbol.short.replace("_", "-")
    return symbol.detail


def _called(symbol: Symbol) -> str:
    """A function as it is called: its name and parameters, without annotations and defaults."""
    match = re.search(r"def\s+\w+\((.*)\)", symbol.header, re.DOTALL)
    source = parse(f"def f({match[1]}): pass") if match and symbol.kind != "class" else None
    if source is None or not isinstance(function := source.tree.body[0], ast.FunctionDef):
        return symbol.name
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)] + (
        ["*" + arguments.vararg.arg] if arguments.vararg else []
    )
    names += [a.arg for a in arguments.kwonlyargs] + (["**" + arguments.kwarg.arg] if arguments.kwarg else [])
    return f"{symbol.name}({', '.join(n for n in names if n not in ('self', 'cls'))})"


def _shown(deletion: Deletion) -> list[Symbol]:
    """Targets whose signatures the instruction shows: the public ones."""
    if deletion.operator in ("unregister", "bug", "remove_branch"):
        return []
    targets = deletion.targets
    return [t for i, t in enumerate(targets) if i == 0 or is_public(t.name)]


def _signatures(targets: Sequence[Symbol]) -> list[str]:
    headers = [target.header for target in targets if target.header]
    return ["```python\n" + "\n".join(headers) + "\n```"] if headers else []


def _docstring(deletion: Deletion) -> str:
    return (
        deletion.symbol.docstring if deletion.operator not in ("unregister", "bug", "remove_branch") else ""
    )


def _restore(deletion: Deletion) -> list[str]:
    traces = [t for t in _merged(deletion.traces) if t.place not in ("branch", "parameter", "decorator")]
    if deletion.operator == "unregister" or not traces:
        return []
    return ["Also restore:\n" + "\n".join(f"- {_also(trace)}" for trace in traces)]


def _names(needed: Sequence[str], text: str) -> list[str]:
    missing = [name for name in needed if not _mentions(text, name)]
    return [f"Names that the tests use: {', '.join(f'`{name}`' for name in missing)}."] if missing else []


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def _merged(traces: tuple[Trace, ...]) -> list[Trace]:
    """Traces in which names that left the imports of one file stand together."""
    names: dict[tuple[str, str], list[str]] = {}
    for trace in traces:
        names.setdefault((trace.path, trace.place), []).append(trace.what)
    return [
        Trace(path, what, place)
        for (path, place), written in sorted(names.items())
        for what in ([", ".join(written)] if place == "import" else written)
    ]


def _also(trace: Trace) -> str:
    what = " ".join(trace.what.split())
    if trace.place == "import":
        return f"the import of {what} in {trace.path}"
    if trace.place == "statement":
        return f"`{what}` in {trace.path}"
    return f"`{what}` in `{trace.place}` of {trace.path}"
