"""The interface that a patch has to keep: a call that was possible, and is with the original code, stays possible.

Hidden tests make some calls only, and a right solution may drop a parameter or a function that none of them uses. So
definitions are compared as text, by their syntax trees: nothing of a patch is run. A definition is looked for under its
own name, through `name = other` and imports inside the workspace. Where that does not show what a name stands for (a
wrapper, another library, a base class), nothing is held against the patch.

To the interface belongs what a function refuses: one that the original leaves as it was may not raise on less.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from woodshed.pysource import code

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Bound = Mapping[str, Sequence[ast.AST | tuple[ast.ImportFrom, str]]]
"""Name to what may be bound to it: a node, or the name that is imported under it."""

MAX_CHARS = 1_000_000
SAME_CALLS = {
    *("cache", "lru_cache", "wraps", "staticmethod", "classmethod", "abstractmethod"),
    *("contextmanager", "asynccontextmanager", "override", "final", "deprecated"),
}
"""Decorators behind which a function is called as it is written."""
DYNAMIC = {"globals", "locals", "vars", "setattr", "exec", "__getattr__", "__dict__", "modules", "*"}
"""Names that may bind others out of sight."""


@dataclass(frozen=True)
class Signature:
    """Calls that a function takes."""

    positional: tuple[str, ...]
    num_nameless: int
    """So many of them, from the first, are given by position only."""
    num_needed: int
    """So many of them, from the first, have no default."""
    keyword: dict[str, bool] = field(default_factory=dict)
    """Parameters by keyword only, and whether they are needed."""
    rest: str = ""
    """Name of *args, which takes more by position."""
    others: str = ""
    """Name of **kwargs, which takes more by keyword."""

    def holds(self, count: int) -> bool:
        """True if a call may give exactly so many arguments by position."""
        fits = count <= len(self.positional) or bool(self.rest)
        return fits and count >= min(self.num_nameless, self.num_needed)

    def needs(self, count: int) -> set[str]:
        """Names that such a call has to give."""
        return {*self.positional[count : self.num_needed], *(n for n, need in self.keyword.items() if need)}

    def takes(self, count: int, name: str) -> bool:
        """True if it may name this."""
        named = self.positional[self.num_nameless :]
        free = name in self.positional[max(count, self.num_nameless) :]
        return free or name in self.keyword or (bool(self.others) and name not in named)


def lost(given: Sequence[Signature], now: Signature) -> str:
    """Describe the calls that each of `given` takes and `now` does not; "" where it takes them all.

    Exact: a call is a number of positions and a set of names, and whether names are needed or taken depends on the
    number alone.
    """
    everyone = (*given, now)
    names = [*dict.fromkeys(n for s in everyone for n in (*s.positional, *s.keyword)), ""]  # "": any other
    for count in range(max(len(s.positional) for s in everyone) + 2):
        needed = {name for s in given for name in s.needs(count)}
        allowed = [name for name in names if all(s.takes(count, name) for s in given)]
        if not all(s.holds(count) for s in given) or not needed <= set(allowed):
            continue  # nobody could call it so
        if gone := [name for name in allowed if not now.takes(count, name)]:
            how = " by keyword" if gone[0] in now.positional else ""
            return f"no longer takes `{gone[0] or '**' + given[0].others}`{how}"
        if new := now.needs(count) - needed:
            return f"now requires `{min(new)}`"
        if not now.holds(count):
            if count <= len(now.positional):
                return f"no longer takes `{now.positional[count]}` by keyword"
            listed = given[0].positional
            return f"no longer takes `{listed[count - 1] if count <= len(listed) else '*' + given[0].rest}` by position"
    return ""


def signature(node: Function, *, in_class: bool) -> Signature:
    """As it is written; for a method without the object that it is called on."""
    spec = node.args
    positional = tuple(a.arg for a in (*spec.posonlyargs, *spec.args))
    needed = [default is None for default in spec.kw_defaults]
    bound = int(in_class and "staticmethod" not in map(_last, getattr(node, "decorator_list", [])))
    bound = min(bound, len(positional))
    return Signature(
        positional[bound:],
        max(len(spec.posonlyargs) - bound, 0),
        max(len(positional) - len(spec.defaults) - bound, 0),
        dict(zip((a.arg for a in spec.kwonlyargs), needed, strict=True)),
        spec.vararg.arg if spec.vararg else "",
        spec.kwarg.arg if spec.kwarg else "",
    )


def told(signature: Signature, words: frozenset[str]) -> Signature | None:
    """The part of a signature known to a reader of these names; None where one that is needed is not among them."""
    known = next((n for n, p in enumerate(signature.positional) if p not in words), len(signature.positional))
    if known < signature.num_needed or any(n and p not in words for p, n in signature.keyword.items()):
        return None
    later = {p: False for p in signature.positional[max(known, signature.num_nameless) :] if p in words}
    return Signature(
        signature.positional[:known],
        min(signature.num_nameless, known),
        signature.num_needed,
        {p: need for p, need in signature.keyword.items() if p in words} | later,
        signature.rest if known == len(signature.positional) and signature.rest in words else "",
        signature.others if signature.others in words else "",
    )


@dataclass(frozen=True)
class Declaration:
    """A definition of the original code, as far as it has to be kept. It holds no line of the code."""

    digest: str
    """Of the syntax tree."""
    wrappers: tuple[str, ...]
    """Decorators that may change how it is called."""
    signature: Signature | None
    """None: a class."""


@dataclass(frozen=True)
class ModuleApi:
    """The definitions of one module of the original code."""

    path: str
    """"" where the original has no such module."""
    declarations: dict[str, Declaration]
    """By dotted name."""


Api = Mapping[str, ModuleApi]
"""By the module's path without its ending."""


class SourceTree:
    """Python files of a workspace, in which names are looked up."""

    def __init__(self, read: Callable[[str], str | None], roots: Sequence[str] = (".",)) -> None:
        """`read` gives a file's text by its path, None where there is none; `roots` are on PYTHONPATH."""
        self._read, self._roots = functools.cache(read), roots
        self._parsed: dict[str, ast.Module | None] = {}
        self._bindings: dict[int, Bound] = {}

    def module(self, stem: str) -> ast.Module | None:
        """The tree of `stem`.py or `stem`/__init__.py; None where there is none that can be read."""
        if stem not in self._parsed:
            path = self.path(stem)
            text = "" if path is None else self._read(path) or ""
            self._parsed[stem] = None if path is None or len(text) > MAX_CHARS else _parse(text)
        return self._parsed[stem]

    def definitions(self, stem: str) -> Iterator[tuple[str, Definition]]:
        """Classes, functions and methods that a module defines in one way, by dotted name."""
        module = self.module(stem)
        yield from self._defined(module.body, "") if module else ()

    def find(self, stem: str, name: str, seen: set[tuple[int, str]] | None = None) -> list[Definition] | None:
        """The definitions a dotted name may stand for; none where it is not there, None where nobody can tell."""
        if self.path(stem) is None:
            return []
        module = self.module(stem)
        return None if module is None else self._look(stem, module.body, name.split("."), seen or set())

    def hides(self, stem: str, names: Iterable[str]) -> Counter[str]:
        """Count the ways in which a module may bind these names out of sight."""
        found: Counter[str] = Counter()
        stored = {_last_name(name) for name in names}
        for node in ast.walk(self.module(stem) or ast.Module([], [])):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Store()) if name in stored:
                    found[f".{name} ="] += 1
                case (
                    ast.Name(id=name)
                    | ast.Attribute(attr=name)
                    | ast.FunctionDef(name=name)
                    | ast.alias(name)
                ):
                    found[name] += name in DYNAMIC
        return +found

    def path(self, stem: str) -> str | None:
        """The file of a module."""
        places = (posixpath.join(stem, "__init__.py"), f"{stem}.py")  # a package hides the module beside it
        return next((path for path in places if self._read(path) is not None), None)

    def _defined(self, body: list[ast.stmt], owner: str) -> Iterator[tuple[str, Definition]]:
        for name, (node, *others) in self._bound(body).items():
            if not others and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield f"{owner}{name}", node
                yield from (
                    self._defined(node.body, f"{owner}{name}.") if isinstance(node, ast.ClassDef) else ()
                )

    def _bound(self, body: list[ast.stmt]) -> Bound:
        if id(body) not in self._bindings:  # the parsed modules keep it alive
            self._bindings[id(body)] = _bound(body)
        return self._bindings[id(body)]

    def _look(
        self, stem: str, body: list[ast.stmt], parts: list[str], seen: set[tuple[int, str]]
    ) -> list[Definition] | None:
        nodes = self._bound(body).get(parts[0], ())
        found: list[Definition] = []
        for node in nodes if (id(body), parts[0]) not in seen else ():
            seen.add((id(body), parts[0]))
            more = self._follow(stem, body, node, parts[1:], seen)
            if more is None:
                return None
            found += more
        return found

    def _follow(
        self, stem: str, body: list[ast.stmt], node: object, rest: list[str], seen: set[tuple[int, str]]
    ) -> list[Definition] | None:
        match node:
            case ast.ClassDef() if rest:
                own = self._look(stem, node.body, rest, seen)
                return own or (None if own is None or _inherits(node) else [])
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef() if not rest:
                return [node]
            case ast.Name(id=name) if name in self._bound(body):
                return self._look(stem, body, [name, *rest], seen) or None
            case ast.Name(id=name):
                return self.find(stem, ".".join([name, *rest]), seen) or None
            case (ast.ImportFrom() as origin, str() as name):
                homes = [s for s in self._origins(stem, origin) if self.path(s) is not None]
                return self.find(homes[0], ".".join([name, *rest]), seen) or None if homes else None
        return None

    def _origins(self, stem: str, node: ast.ImportFrom) -> Iterator[str]:
        inner = (node.module or "").replace(".", "/")
        roots = self._roots
        if node.level:
            up = node.level - (self.path(stem) != f"{stem}.py")  # a package is its own first dot
            parts = stem.split("/")
            roots = ["/".join(parts[: max(len(parts) - up, 0)])]
        yield from (posixpath.normpath(posixpath.join(root, inner)) for root in roots)


def api_of(tree: SourceTree, stems: Iterable[str]) -> Api:
    """The definitions of some modules."""
    return {
        stem: ModuleApi(
            tree.path(stem) or "", {name: _declaration(name, node) for name, node in tree.definitions(stem)}
        )
        for stem in stems
    }


def stem_of(path: str) -> str:
    """The path of a Python file as `SourceTree` and `Api` know its module."""
    return path.removesuffix(".py").removesuffix("/__init__")


def _declaration(name: str, node: Definition) -> Declaration:
    called = None if isinstance(node, ast.ClassDef) else signature(node, in_class="." in name)
    return Declaration(_digest(node), tuple(sorted(_wrappers(node))), called)


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(ast.dump(node).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def narrowed(
    before: SourceTree,
    after: SourceTree,
    paths: Iterable[str],
    *,
    original: Api | None = None,
    words: frozenset[str] = frozenset(),
    private: str = "",
) -> list[str]:
    """Lines on what somebody could do before, and can with the original code, and can no longer.

    Args:
        before: what the attempt was given, and `after` what it left.
        paths: files that it changed.
        original: modules that the solved task changes; all others are as before.
        words: names that the instruction tells besides.
        private: dotted name of a definition that counts in spite of an underscore.
    """
    found: list[str] = []
    api = original or {}
    for stem in sorted({*map(stem_of, paths), *api}):
        try:
            right = api.get(stem) or api_of(before, [stem])[stem]
            found += _narrowed(stem, before, after, right, words, private)
        except RecursionError:  # deeper than anybody writes
            continue
    return found


def _narrowed(
    stem: str, before: SourceTree, after: SourceTree, original: ModuleApi, words: frozenset[str], private: str
) -> list[str]:
    found: list[str] = []
    gone: list[str] = []
    for name, right in original.declarations.items():
        old, now = before.find(stem, name), after.find(stem, name)
        if old and now:
            found += _unchecked(name, right, old[0], now[0])
        if not _is_public(name) and name != private:
            continue
        if now and old is not None:
            reasons = [_narrower(name, right, old, one, words) for one in now]
            found += reasons[:1] if all(reasons) else []
        elif old and now == [] and not name.endswith("__") and not _is_within(name, gone):
            gone.append(name)
    if gone and not after.hides(stem, gone) - before.hides(stem, gone):
        found += [f"{name} is gone" for name in gone]
    return [f"{original.path}: {what}" for what in found]


def _is_public(name: str) -> bool:
    return not any(p.startswith("_") and not (p[:2] == p[-2:] == "__") for p in name.split("."))


def _is_within(name: str, outer: Iterable[str]) -> bool:
    return any(name.startswith(f"{one}.") for one in outer)


def _narrower(
    name: str, right: Declaration, old: Sequence[Definition], now: Definition, words: frozenset[str]
) -> str:
    functions = [node for node in (now, *old) if not isinstance(node, ast.ClassDef)]
    if right.signature is None or len(functions) != len(old) + 1 or len(old) > 1:
        return ""
    if any(_wrappers(node) != set(right.wrappers) for node in functions):
        return ""
    kept, *shown = (signature(node, in_class="." in name) for node in functions)
    known = told(right.signature, words.union(*map(_names, shown)))
    if known is None or not (shown or _last_name(name) in words):
        return ""
    has_more = any(not _names(known) <= _names(s) for s in shown)
    reason = lost([known] if has_more else [known, *shown], kept)
    return f"{name} {reason}" if reason else ""


def _unchecked(name: str, right: Declaration, old: Definition, now: Definition) -> list[str]:
    """A check that a function lost and nothing that it calls instead can have taken over."""
    if (
        isinstance(old, ast.ClassDef)
        or num_checks(now) >= num_checks(old)
        or _digest(old) != right.digest
        or _called(now) - _called(old)
    ):
        return []
    kept = [ast.unparse(node) for node in _raising(now)]
    gone = [text for text in map(ast.unparse, _raising(old)) if text not in kept]
    return [f"{name} no longer has `{gone[0]}`" if gone else f"{name} checks less than it did"]


def num_checks(node: ast.AST) -> int:
    """Number of conditions on which a function raises: `if a or b: raise ...` counts as much as two of them."""
    total = len(_raising(node))
    for inner in ast.walk(node):
        direct = [*inner.body, *inner.orelse] if isinstance(inner, ast.If) else []
        if isinstance(inner, ast.Assert) or any(isinstance(one, ast.Raise) for one in direct):
            parts = [n for n in ast.walk(inner.test) if isinstance(n, ast.BoolOp)]  # type: ignore[attr-defined]
            total += sum(len(part.values) - 1 for part in parts)
    return total


def _raising(node: ast.AST) -> list[ast.stmt]:
    found = [n for n in ast.walk(node) if isinstance(n, ast.Raise | ast.Assert)]
    return [n for n in found if "NotImplementedError" not in ast.dump(n)]


def _called(node: ast.AST) -> set[str]:
    return {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}


@functools.lru_cache(maxsize=16)
def _parse(text: str) -> ast.Module | None:
    """Attempts at one task share what they started from."""
    return code.parse(text)


def _bound(body: list[ast.stmt]) -> Bound:
    """The last binding of each name, and those of branches that may or may not run after it."""
    found: dict[str, list[ast.AST | tuple[ast.ImportFrom, str]]] = {}
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found[node.name] = [node]
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    plain = isinstance(target, ast.Name)
                    found.update((name, [value if plain else node]) for name in _stored(target))
            case ast.ImportFrom():
                found.update((alias.asname or alias.name, [(node, alias.name)]) for alias in node.names)
            case ast.Import():
                found.update((a.asname or a.name.partition(".")[0], [node]) for a in node.names)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While() | ast.TryStar() | ast.Match():
                for name, nodes in _branches(node):
                    found[name] = [*found.get(name, ()), *nodes]
            case _:
                found.update((name, [node]) for name in _stored(node))
    return found


def _branches(node: ast.stmt) -> Iterator[tuple[str, Sequence[ast.AST | tuple[ast.ImportFrom, str]]]]:
    for part in ast.iter_child_nodes(node):
        if not isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from ((name, [node]) for name in _stored(part))
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [part.body for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]
    for block in blocks:
        yield from _bound(block).items()


def _stored(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]


def _names(signature: Signature) -> set[str]:
    return {*signature.positional, *signature.keyword, signature.rest, signature.others}


def _wrappers(node: Definition) -> frozenset[str]:
    """Decorators that may change how a function is called."""
    written = getattr(node, "decorator_list", [])
    return frozenset(ast.unparse(one) for one in written if _last(one) not in SAME_CALLS)


def _last(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return _last_name(code.dotted(called, {}))


def _last_name(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _inherits(node: ast.ClassDef) -> bool:
    return bool(node.bases or node.keywords or node.decorator_list)


@functools.lru_cache(maxsize=256)
def words_of(instruction: str) -> frozenset[str]:
    """Names in the code of an instruction: blocks, and what stands between backticks."""
    spans = re.findall(r"```.*?```|`[^`\n]*`", instruction, re.DOTALL)
    return frozenset(re.findall(r"\w+", " ".join(spans)))
