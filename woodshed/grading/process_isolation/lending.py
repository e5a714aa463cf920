"""Rules of what the tests' side lends to the process of the code under test, and of what that may do with it.

Everything that is reached through a lent object is looked at anew, so nothing but what this file allows is within
reach, however long the way: functions and classes that test files define, containers, iterators, text and byte streams,
mocks. Never pytest, its fixtures, test cases, modules, frames, or what an installed package made.
"""

from __future__ import annotations

import builtins
import functools
import sys
import types
from typing import Any

from .values import FORWARDED, READABLE

LENT_MODULES = frozenset(
    (
        *(
            "io",
            "_io",
            "collections",
            "collections.abc",
            "itertools",
            "re",
            "random",
        ),
        *(
            "types",
            "threading",
            "_thread",
            "queue",
            "_queue",
            "decimal",
            "datetime",
            "zoneinfo",
            "array",
            "contextlib",
        ),
        *(
            "unittest.mock",
            "xml.etree.ElementTree",
            "email.message",
            "csv",
            "_csv",
            "fractions",
            "enum",
            "uuid",
        ),
        *(
            "textwrap",
            "tempfile",
            "functools",
            "operator",
            "_operator",
            "_random",
            "weakref",
            "_weakrefset",
            "abc",
        ),
    )
)
"""Modules of the standard library whose objects are lent."""
NEVER = (
    *(types.FrameType, types.TracebackType, types.CodeType, types.ModuleType, types.CellType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, type(sys.flags)),
)
BUILTIN_ITERATORS = (
    "iterator",
    "_keys",
    "_values",
    "_items",
    "map",
    "filter",
    "zip",
    "enumerate",
    "reversed",
)
PRIVATE_PREFIXES = ("_", "gi_", "cr_", "ag_", "f_", "tb_", "co_", "func_")
OF_OWN = frozenset(("__dict__", "__annotations__", "__mro__", "__bases__", "__slots__"))
"""Names that may be asked of the tests' own classes and instances: each thing in it is looked at when it is sent."""
WRAPPERS = ("functools", "contextlib")
"""Modules of the standard library whose closures around a test's functions are lent like those."""


class Lending:
    """The rules for one session.

    Args:
        workspace: the folder whose files are the tests' own, as far as this process imports any from there.
    """

    def __init__(self, workspace: str):
        self.inside = workspace.rstrip("/") + "/"

    def allows(self, value: Any) -> bool:
        """True if an object may be lent."""
        kind = type(value)
        if isinstance(value, NEVER):
            return False
        if kind is types.FunctionType:
            return self._is_own_function(value)
        if kind is types.MethodType:
            owner = type(value.__self__)
            is_library = owner.__module__ in LENT_MODULES and _is_in_its_module(owner)
            return self.allows(value.__func__) or (  # whose it is, nobody can ask
                is_library and getattr(value.__func__, "__module__", None) == owner.__module__
            )
        if kind in (types.BuiltinFunctionType, types.MethodWrapperType):
            owner = value.__self__
            return not isinstance(owner, NEVER) and not isinstance(owner, type) and self._is_lendable(owner)
        if isinstance(value, types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType):
            code = next(
                getattr(value, name) for name in ("gi_code", "cr_code", "ag_code") if hasattr(value, name)
            )
            return code.co_filename.startswith(self.inside)
        if isinstance(value, type):
            return self._is_own_class(value)
        return self._is_lendable(value)

    def _is_lendable(self, value: Any) -> bool:
        kind = type(value)
        if kind.__module__ == "builtins":
            plain = (str, bytes, bytearray, int, float, list, tuple, dict, set, frozenset, object, memoryview)
            return (
                kind in plain or kind.__name__.endswith(BUILTIN_ITERATORS) or isinstance(value, BaseException)
            )
        return self._is_own_class(kind) or (kind.__module__ in LENT_MODULES and _is_in_its_module(kind))

    def _is_own_function(self, function: types.FunctionType) -> bool:
        if function.__code__.co_filename.startswith(self.inside):
            return True
        made_by = function.__globals__.get("__name__")
        return made_by in WRAPPERS and self._is_own_module(function.__module__)

    def _is_own_class(self, kind: type) -> bool:
        return (_is_mock(kind) or self._is_own_module(kind.__module__)) and not _is_frameworks(kind)

    def _is_own_module(self, name: Any) -> bool:
        module = sys.modules.get(name) if type(name) is str else None
        file = module.__dict__.get("__file__") if type(module) is types.ModuleType else None
        return type(file) is str and file.startswith(self.inside)

    def may_get(self, subject: Any, name: Any) -> bool:
        """True if the other side may read an attribute."""
        if type(name) is not str or not name.isidentifier() or not self.allows(subject):
            return False
        if _is_mock(type(subject)) and name in dir(sys.modules["unittest.mock"].Mock):
            return False  # what it was told, and whether that was right, is the test's to ask
        if name in READABLE or not name.startswith(PRIVATE_PREFIXES):
            return True
        kind = subject if isinstance(subject, type) else type(subject)
        is_own = self._is_own_class(kind) and not _is_mock(kind)
        return is_own and (name in OF_OWN or not name.startswith("__"))

    def may_set(self, subject: Any, name: Any) -> bool:
        """True if it may write one: data of a test's own object or function, never a method, never of a class."""
        if not self.may_get(subject, name) or name in READABLE or isinstance(subject, type):
            return False
        if type(subject) is types.FunctionType:
            return not name.startswith(("pytest", "test"))
        is_simple = type(subject) is types.SimpleNamespace
        if not (is_simple or self._is_own_class(type(subject))) or _is_mock(type(subject)):
            return False
        return not callable(getattr(type(subject), name, None)) and not callable(getattr(subject, name, None))

    def may_do(self, subject: Any, special: Any) -> bool:
        """True if it may call a special method."""
        return type(special) is str and special in FORWARDED and self.allows(subject)


def _is_mock(kind: type) -> bool:
    """True for the classes of mocks: each mock has one of its own."""
    mock = sys.modules.get("unittest.mock")
    return mock is not None and issubclass(kind, mock.NonCallableMock)


def _is_frameworks(kind: type) -> bool:
    """True for a type that runs or reports tests, below such a one, or whose instances have tests."""
    for owner in kind.__mro__:
        top = owner.__module__ if isinstance(owner.__module__, str) else ""
        is_framework = top.partition(".")[0] in ("_pytest", "pytest", "pluggy", "hypothesis", "unittest")
        if is_framework and not top.startswith("unittest.mock"):
            return True
    return any(name.startswith("test") for name in dir(kind))


def _is_in_its_module(kind: type) -> bool:
    """True for a type that is where it says that it is from."""
    found: Any = sys.modules.get(kind.__module__, builtins)
    return (
        functools.reduce(lambda place, part: getattr(place, part, None), kind.__qualname__.split("."), found)
        is kind
    )
