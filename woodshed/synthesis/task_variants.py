"""Variants of tasks that are harder: the code that the agent would see, the request, and the code to restore.

Nothing here is proven; a draft is a guess at a task. Operators H1 to H12 are described in `harden`.
"""

from __future__ import annotations

import ast
import contextlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property

from woodshed.pysource import syntax
from woodshed.pysource.edits import apply, parse, remove_statement
from woodshed.records import Task
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.synthesis import leaks, operators, pruning
from woodshed.synthesis.characterisation import more_cases
from woodshed.synthesis.leaks import fingerprints
from woodshed.synthesis.names import Codebase
from woodshed.synthesis.operators import Deletion
from woodshed.tasks import folder, sandbox_spec

Files = dict[str, str | None]
"""Path to text; None for a file that is not there."""


@dataclass(frozen=True)
class Parent:
    """A task and the repository as it was before anything was taken away."""

    task: Task
    before: Files
    """Original text of every text file that the task or its tests touch, and of all Python files."""
    shown: Files
    """Texts of the differing files in the workspace."""
    failure: Files
    """Files of an attempt that failed; empty where there is none."""
    sandboxes: SandboxProvider = BUBBLEWRAP
    """For what is asked of its code, and the proofs of its variants."""

    @classmethod
    def open(
        cls, task: Task, failure: Files | None = None, sandboxes: SandboxProvider = BUBBLEWRAP
    ) -> Parent:
        workspace = folder.workspace(task)
        present: Files = {}
        for file in sorted(workspace.rglob("*.py*")):
            if file.is_file() and file.suffix in (".py", ".pyi") and not file.is_symlink():
                _remember(present, file.relative_to(workspace).as_posix(), file.read_bytes())
        before = dict(present)
        for path, text in folder.gold_patch(task).files.items():
            before[path] = text
        for path, data in folder.protected_files(task).items():
            _remember(before, path, data)
            if path not in present and (workspace / path).is_file():
                _remember(present, path, (workspace / path).read_bytes())
        shown = {path: present.get(path) for path in before if before[path] != present.get(path)}
        shown |= {path: text for path, text in present.items() if path not in before}
        for path in shown:
            before.setdefault(path, None)
        return cls(task, before, shown, failure or {}, sandboxes)

    @property
    def gold(self) -> Files:
        """Original text of the code that is missing."""
        return {path: self.before[path] for path in self.shown if not is_test(path)}

    @property
    def code(self) -> Codebase:
        """The package's own files, whole."""
        allowed = tuple(f"{path}/" for path in self.task.allowed_paths)
        modules = {p: t for p, t in self.before.items() if p.endswith(".py") and not is_test(p)}
        texts = {p: t for p, t in modules.items() if t is not None and f"{p}/".startswith(allowed)}
        return Codebase(texts, self.task.environment.source_roots)

    @cached_property
    def copies(self) -> dict[tuple[str, str], str]:
        """Functions of the package that also stand in Python's library or a dependency (`leaks.copies`)."""
        return leaks.copies(self.code.texts, sandbox_spec(self.task), self.sandboxes)

    @property
    def tests(self) -> dict[str, str]:
        return {p: t for p, t in self.before.items() if t is not None and is_test(p) and p.endswith(".py")}

    @property
    def short(self) -> str:
        return self.task.target_symbol.rpartition(".")[2]


@dataclass(frozen=True)
class VariantDraft:
    """Description of a variant before it is made."""

    operator: str
    instruction: str
    shown: Files
    """Texts in the workspace of files that differ from the original repository."""
    gold: Files
    """Texts that the gold patch restores."""
    level: int = 0
    hidden: dict[str, str] = field(default_factory=dict)
    """Text of hidden test files that are new or other than the parent's."""
    more_ids: tuple[str, ...] = ()
    """Hidden tests beside the parent's."""
    symbol: str = ""
    """The target's new name."""
    command: str | None = None
    """Test command for the agent, where it is not the parent's."""


def _remember(texts: Files, path: str, data: bytes) -> None:
    """Add the text of a file; a file that is no text stays as it is, which no variant needs to know."""
    with contextlib.suppress(syntax.UnreadableError):
        texts[path] = syntax.read(path, data)


def is_test(path: str) -> bool:
    return folder.is_protected(path)


# ---- more is missing --------------------------------------------------------------------------------------


def combine(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H1: with another task of the same repository."""
    mine = parent.task.provenance.get("sha256", parent.task.provenance.get("source"))
    others = [
        other
        for other in parents
        if other is not parent
        and other.task.environment == parent.task.environment
        and other.task.provenance.get("sha256", other.task.provenance.get("source")) == mine
        and other.task.target_symbol != parent.task.target_symbol
    ]
    for other in draw.sample(others, len(others)):
        merged = _merged(parent, other.shown)
        if merged is not None:
            asked = (parent.task.instruction.strip(), other.task.instruction.strip())
            text = f"Two things are missing.\n\n1. {asked[0]}\n\n2. {asked[1]}\n"
            yield VariantDraft("H1", text, merged, {**parent.gold, **other.gold}, level=5)


def widen(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H2: a function of the same file that the target uses, or that uses it, loses its body as well."""
    for deletion in _neighbours(parent, draw, same_file=True):
        yield from _with_deletion(
            parent, deletion, "H2", "`{name}` in {path} is missing, too: `{header}`", level=3
        )


def spread(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H5: users in other files lose their bodies as well."""
    for deletion in _neighbours(parent, draw, same_file=False):
        yield from _with_deletion(
            parent, deletion, "H5", "`{name}` in {path} is missing, too: `{header}`", level=3
        )


def sequence(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H10: what uses the target is asked for as a second step."""
    code = parent.code
    users = (d for same in (True, False) for d in _neighbours(parent, draw, same_file=same))
    for deletion in users:
        if not _mentions(code.texts[deletion.symbol.path], deletion.symbol.name, parent.short):
            continue
        text = "Then, with that in place, implement `{name}` in {path}: `{header}`"
        yield from _with_deletion(parent, deletion, "H10", text, level=3)


def deepen(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H3: where a body was missing, the whole function goes, with what refers to it."""
    if parent.task.operator.partition("+")[0] != "stub":
        return
    code = parent.code
    for symbol in operators.symbols(code):
        if (symbol.path, symbol.name) == (parent.task.target_path, parent.task.target_symbol):
            try:
                deletion = operators.remove(code, symbol)
            except operators.CascadeError:
                return
            lost = parent.task.fail_to_pass
            visible = pruning.prune(deletion, parent.tests, lost)
            shown: Files = {**deletion.changed, **{p: t for p, t in visible.items() if t != parent.before[p]}}
            also = "".join(f"\n- `{' '.join(t.what.split())}` in {t.path}" for t in deletion.traces)
            text = f"`{symbol.name}` is gone from {symbol.path}. Bring it back:\n\n```python\n{symbol.header}\n```\n"
            text += f"\nIt stood in these places, too:{also}\n" if also else ""
            gold: Files = {path: parent.before[path] for path in deletion.changed}
            yield VariantDraft("H3", text + "\nHidden tests decide.\n", shown, gold, level=2)


def _neighbours(parent: Parent, draw: random.Random, *, same_file: bool) -> Iterator[Deletion]:
    """Stubs of functions that the target calls or that call it."""
    code = parent.code
    target = parent.task.target_path
    gold = next((b for b in _functions(parent.before.get(target)) if b[0] == parent.task.target_symbol), None)
    called = {node.id for node in ast.walk(gold[1]) if isinstance(node, ast.Name)} if gold else set()
    near = [
        symbol
        for symbol in operators.symbols(code)
        if (symbol.path == target) == same_file
        and symbol.name != parent.task.target_symbol
        and (symbol.short in called or _mentions(code.texts[symbol.path], symbol.name, parent.short))
    ]
    for symbol in draw.sample(near, len(near)):
        try:
            yield operators.stub(code, symbol)
        except operators.CascadeError:
            continue


def _with_deletion(
    parent: Parent, deletion: Deletion, operator: str, text: str, level: int
) -> Iterator[VariantDraft]:
    symbol = deletion.symbol
    visible = pruning.prune(deletion, parent.tests, _tests_naming(parent, symbol.short))
    shown: Files = {**deletion.changed, **{p: t for p, t in visible.items() if t != parent.before[p]}}
    merged = _merged(parent, shown)
    if merged is not None:
        said = text.format(name=symbol.name, path=symbol.path, header=" ".join(symbol.header.split()))
        instruction = f"{parent.task.instruction.strip()}\n\n{said}\n"
        gold: Files = {**parent.gold, **{path: parent.before[path] for path in deletion.changed}}
        yield VariantDraft(operator, instruction, merged, gold, level=level)


def _tests_naming(parent: Parent, name: str) -> list[str]:
    """Tests that mention a name: shown, they would fail."""
    naming = []
    for test in (*parent.task.fail_to_pass, *parent.task.pass_to_pass):
        path, _, inner = test.partition("::")
        wanted = inner.partition("[")[0].replace("::", ".")
        for dotted, function in _functions(parent.before.get(path)):
            if dotted == wanted and name in ast.unparse(function):
                naming.append(test)
    return naming


def _mentions(text: str, dotted: str, name: str) -> bool:
    return any(
        d == dotted and re.search(rf"\b{re.escape(name)}\b", ast.unparse(f)) for d, f in _functions(text)
    )


def _functions(text: str | None) -> list[tuple[str, fingerprints.Function]]:
    try:
        return list(fingerprints.functions(syntax.parse(text or "")))
    except (SyntaxError, ValueError):
        return []


# ---- less is said -----------------------------------------------------------------------------------------


def hide(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H4: the sentence that a colleague would type; only the names that hidden tests need."""
    names = _names(parent)
    text = (
        f"{', '.join(f'`{name}`' for name in names)} stopped working. Please make it work as it did before.\n"
    )
    if len(text) <= 200 and len(text) < 0.7 * len(parent.task.instruction):
        yield VariantDraft("H4", text, parent.shown, parent.gold)


def withhold_command(
    parent: Parent, parents: Sequence[Parent], draw: random.Random
) -> Iterator[VariantDraft]:
    """H12: the command that runs the tests is not said."""
    command = parent.task.test_command
    text = re.sub(rf" *(Run the visible ones: )?`{re.escape(command)}`\.?", "", parent.task.instruction)
    if command and text != parent.task.instruction:
        yield VariantDraft("H12", text, parent.shown, parent.gold, command="python -m pytest -q")


def constrain(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H6: nothing may be imported that the repository did not import before; a hidden test looks."""
    allowed = sorted({name for text in parent.code.texts.values() for name in _imported(text)})
    path = _test_folder(parent) + "test_woodshed_imports.py"
    files = sorted(parent.gold)
    text = IMPORTS_TEST.format(files=files, allowed=allowed)
    said = f"{parent.task.instruction.strip()}\n\nDo not import anything that the package does not import already.\n"
    name = f"{path}::test_nothing_new_is_imported"
    yield VariantDraft("H6", said, parent.shown, parent.gold, hidden={path: text}, more_ids=(name,))


def _imported(text: str) -> set[str]:
    try:
        tree = syntax.parse(text)
    except SyntaxError:
        return set()
    found = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return found | {
        (n.module or "").partition(".")[0]
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and not n.level
    }


def _names(parent: Parent) -> list[str]:
    """Names that went missing, as tests write them."""
    changed = [path for path in parent.gold if path.endswith(".py")]
    intact = {ast.dump(f) for path in changed for _, f in _functions(parent.shown[path])}
    missing = [d for path in changed for d, f in _functions(parent.before[path]) if ast.dump(f) not in intact]
    return [name for name in missing if not any(name.startswith(f"{other}.") for other in missing)]


def _test_folder(parent: Parent) -> str:
    """Folder of the first hidden test, with a slash."""
    return parent.task.fail_to_pass[0].partition("::")[0].rpartition("/")[0] + "/"


# ---- other grounds ----------------------------------------------------------------------------------------


def drift(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H8: the target gets another name, everywhere, so that recalling the published code does not help."""
    old = parent.short
    new = (
        f"{draw.choice(('do', 'get', 'make', 'run'))}_{draw.choice(('plain', 'own', 'fresh', 'core'))}_{old}"
    )
    if len(old) < 4 or (old.startswith("__") and old.endswith("__")):
        return
    word = re.compile(rf"(?<![\w])\b{re.escape(old)}\b")

    def renamed(text: str | None) -> str | None:
        return None if text is None else word.sub(new, text)

    original = {path: renamed(text) for path, text in parent.before.items()}
    shown: Files = {path: renamed(parent.shown.get(path, text)) for path, text in parent.before.items()}
    hidden = {p: t for p, t in original.items() if t is not None and is_test(p) and t != parent.before[p]}
    gold: Files = {p: t for p, t in original.items() if not is_test(p) and t != shown[p]}
    yield VariantDraft(
        "H8",
        word.sub(new, parent.task.instruction),
        {p: t for p, t in shown.items() if t != parent.before[p] or p in parent.shown},
        gold,
        hidden=hidden,
        symbol=word.sub(new, parent.task.target_symbol),
        command=parent.task.test_command,
    )


def distract(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H9: a file beside the target's with look-alikes: other functions of the package under names like its own."""
    others = [s for s in operators.symbols(parent.code) if "." not in s.name and s.short != parent.short]
    chosen = draw.sample(others, min(6, len(others)))
    home = parent.task.target_path.rpartition("/")[0]
    path = f"{home}/" * bool(home) + f"_{parent.short.strip('_')}_drafts.py"
    if len(chosen) < 2 or path in parent.before:
        return
    blocks = []
    for number, symbol in enumerate(chosen):
        node = next(f for d, f in _functions(parent.before[symbol.path]) if d == symbol.name)
        node.name, node.decorator_list = f"{parent.short}_v{number}", []
        blocks.append(ast.unparse(node))
    text = '"""Earlier drafts; nothing imports them."""\n\n\n' + "\n\n\n".join(blocks) + "\n"
    said = f"{parent.task.instruction.strip()}\n\n{path} holds drafts that were given up.\n"
    yield VariantDraft("H9", said, {**parent.shown, path: text}, parent.gold)


def resume_failure(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H11: the workspace as a failed attempt left it (higher-order bugs of self-play, arXiv 2512.18552)."""
    kept = {p: t for p, t in parent.failure.items() if p in parent.gold and t != parent.shown.get(p)}
    if kept:
        name = parent.task.target_symbol
        text = f"An earlier attempt at this was given up; `{name}` in {parent.task.target_path} is still wrong.\n\n"
        yield VariantDraft("H11", text + parent.task.instruction, {**parent.shown, **kept}, parent.gold)


def strengthen(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """H7: hidden calls with other arguments than the known tests', answered by the gold code in the sandbox."""
    module = parent.code.modules.get(parent.task.target_path)
    text = more_cases(parent.task, module.name, draw, parent.sandboxes) if module is not None else None
    if text is not None:
        path = _test_folder(parent) + "test_woodshed_more.py"
        tree = syntax.parse(text)
        count = next(len(ast.literal_eval(n.value)) for n in tree.body if isinstance(n, ast.Assign))
        ids = tuple(f"{path}::test_more[{number}]" for number in range(count))
        yield VariantDraft(
            "H7", parent.task.instruction, parent.shown, parent.gold, hidden={path: text}, more_ids=ids
        )


# ---- easier -----------------------------------------------------------------------------------------------


def narrow(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """E1: of all that is missing only the body of the target; everything else is there again."""
    target = (parent.task.target_path, parent.task.target_symbol)
    if parent.task.operator == "stub":
        return
    for symbol in operators.symbols(parent.code):
        if (symbol.path, symbol.name) == target:
            try:
                deletion = operators.stub(parent.code, symbol)
            except operators.CascadeError:
                return
            visible = pruning.prune(deletion, parent.tests, parent.task.fail_to_pass)
            shown: Files = {**deletion.changed, **{p: t for p, t in visible.items() if t != parent.before[p]}}
            text = f"Implement `{symbol.name}` in {symbol.path}:\n\n```python\n{symbol.header}\n```\n"
            text += f"\n{symbol.docstring}\n"
            gold: Files = {path: parent.before[path] for path in deletion.changed}
            yield VariantDraft("E1", f"{text}\nHidden tests decide.\n", shown, gold)


def explain(parent: Parent, parents: Sequence[Parent], draw: random.Random) -> Iterator[VariantDraft]:
    """E2: what the hidden tests look at is told by their names, and the whole docstring is there."""
    target = (parent.task.target_path, parent.task.target_symbol)
    names = dict.fromkeys(test.partition("::")[2].partition("[")[0] for test in parent.task.fail_to_pass)
    told = "".join(f"\n- {name.replace('::', ': ').replace('_', ' ')}" for name in list(names)[:12])
    said = next((s.docstring for s in operators.symbols(parent.code) if (s.path, s.name) == target), "")
    text = f"{parent.task.instruction.strip()}\n\n{said}\n\nHidden tests look at:{told}\n"
    yield VariantDraft("E2", text, parent.shown, parent.gold)


# ---- tests ------------------------------------------------------------------------------------------------


def without_tests(text: str, ids: set[str]) -> str | None:
    """A test file without some of its tests; None where it would not be Python any more."""
    names = {test.partition("::")[2].partition("[")[0].replace("::", ".") for test in ids}
    source = parse(text)
    if source is None or not names:
        return text if source is not None else None
    found = []
    for scope, body in [("", source.tree.body), *_class_bodies(source.tree)]:
        for node in body:
            if f"{scope}{getattr(node, 'name', '')}" in names:
                found.append(remove_statement(source, node, body))
    left = apply(text, found)
    return left if parse(left) is not None else None


def _class_bodies(tree: ast.Module) -> list[tuple[str, list[ast.stmt]]]:
    return [(f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]


# ---- merging ----------------------------------------------------------------------------------------------


def _merged(parent: Parent, shown: Files) -> Files | None:
    """The workspace with both gaps; None if they touch."""
    merged: Files = dict(parent.shown)
    for path, theirs in shown.items():
        base, ours = parent.before.get(path), parent.shown.get(path, parent.before.get(path))
        if base is None or ours is None or theirs is None:
            merged[path] = None if base is not None else theirs
            continue
        both = merge(base, ours, theirs)
        if both is None and not is_test(path):
            return None
        merged[path] = both  # a test file whose gaps touch is not shown
    return merged


def merge(base: str, ours: str, theirs: str) -> str | None:
    """Both changes of a text, line by line; None where they touch different things at one place."""
    old = syntax.lines(base)
    edits: set[tuple[int, int, str]] = set()
    for text in (ours, theirs):
        new = syntax.lines(text)
        for kind, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if kind != "equal":
                edits.add((i1, i2, "".join(new[j1:j2])))
    ordered: list[tuple[int, int, str]] = []
    for begin, end, text in sorted(edits):
        if ordered and begin < ordered[-1][1]:
            before, until, first = ordered.pop()
            if first or text:
                return None
            begin, end = before, max(until, end)  # both delete it
        ordered.append((begin, end, text))
    for begin, end, text in reversed(ordered):
        old[begin:end] = [text]
    return "".join(old)


IMPORTS_TEST = '''\
"""The package imports what it imported before, and nothing else."""

import ast
import pathlib

FILES = {files!r}
ALLOWED = set({allowed!r})


def test_nothing_new_is_imported():
    for path in FILES:
        for node in ast.walk(ast.parse(pathlib.Path("/workspace", path).read_bytes())):
            if isinstance(node, ast.Import):
                assert {{alias.name.partition(".")[0] for alias in node.names}} <= ALLOWED
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").partition(".")[0] in ALLOWED
            elif isinstance(node, ast.Name):
                assert node.id != "__import__"
'''
