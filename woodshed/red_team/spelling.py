"""Spellings of the same code: plain, with every telling word in pieces, and as one encoded text."""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import Callable, Mapping

from woodshed.pysource import syntax

WORDS = re.compile(
    r"_|frame|test|pytest|trace|profile|/proc/|runner|reward|gc|inspect|ctypes|unittest|mock|sys|builtins|importlib|exec|eval"
)
"""Parts of words that a list of suspicious ones may hold."""
SPACE = """\
_n = globals()["__buil" "tins__"]
_n = _n if isinstance(_n, dict) else vars(_n)
"""


def plain(code: str) -> str:
    return code


def in_pieces(code: str) -> str:
    """No import, and neither attribute nor text with a telling word, is spelled out."""
    tree = syntax.parse(code)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {_bound(alias) for node in imports for alias in node.names}
    new = {name: f"m{number}" for number, name in enumerate(sorted(names))}
    tree = ast.fix_missing_locations(Pieces(new).visit(tree))
    return SPACE + ast.unparse(tree) + "\n"


def encoded(code: str) -> str:
    """One text in base 85 that is run in the module's namespace."""
    data = base64.b85encode(code.encode()).decode()
    return f'{SPACE}import base64 as _b\n_n["ex" "ec"](_b.b85decode({data!r}).decode(), globals())\n'


SPELLINGS: dict[str, Callable[[str], str]] = {"plain": plain, "pieces": in_pieces, "encoded": encoded}


class Pieces(ast.NodeTransformer):
    """Rewrites imports, attributes and constants so that no telling word is left in one piece.

    Args:
        names: new names of what is imported.
    """

    def __init__(self, names: Mapping[str, str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        lines = [f"{self.names[_bound(a)]} = {_imported(a.name, 'x' * bool(a.asname))}" for a in node.names]
        return syntax.parse("\n".join(lines)).body

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        module = node.module or ""
        lines = [
            f"{self.names[_bound(a)]} = getattr({_imported(module, a.name)}, {_cut(a.name)})"
            for a in node.names
        ]
        return syntax.parse("\n".join(lines)).body

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load) or not WORDS.search(node.attr):
            return node
        name = ast.Name("getattr", ast.Load())
        return ast.Call(name, [node.value, syntax.parse(_cut(node.attr), mode="eval").body], [])

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and WORDS.search(node.value):
            return syntax.parse(_cut(node.value), mode="eval").body
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        for name in ast.walk(node):  # pieces would need more kinds of quotes than there are
            if isinstance(name, ast.Name):
                self.visit_Name(name)
        return node


def _bound(alias: ast.alias) -> str:
    """The name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def _imported(module: str, leaf: str) -> str:
    """An expression for the module that has or is `leaf`; without one, for the package at its top."""
    more = f", fromlist=[{_cut(leaf)}]" if leaf else ""
    return f"_n[{_cut('__import__')}]({_cut(module)}{more})"


def _cut(text: str) -> str:
    """An expression for a text, in pieces of two characters."""
    return "+".join(repr(text[at : at + 2]) for at in range(0, len(text), 2)) or "''"
