"""Imports of the tests' process: installed packages, stand-ins, and files that were there before the code under test.

The other process can write to the workspace and to /tmp. A module or bytecode that it leaves there, for whatever name a
test or a library may look up later, would run here.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import pickle
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from typing import Any

from .stand_ins import Asker, RemoteType, Unpickled
from .values import believed

TESTS = {"test", "tests", "testing"}
REFUSED = "under isolation tests do not {} text or bytes that may be another process's"


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the repository's packages as stand-ins; its tests, also those inside a package, are imported here."""

    def __init__(self, peer: Asker, packages: Sequence[str]):
        self.peer, self.packages = peer, frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parts = name.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        if self.packages.isdisjoint(above) or TESTS & set(parts) or parts[-1] == "conftest":
            return None
        if parts[-1].startswith("test_") or parts[-1].endswith("_test"):
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: Any) -> Any:
        return self.peer.ask("import", spec.name)

    def exec_module(self, module: Any) -> None:
        for name in ("__path__", "__file__"):
            with contextlib.suppress(AttributeError):
                module.__dict__[name] = self.peer.ask("get", module, name)


class OwnFiles(importlib.abc.PathEntryFinder):
    """Modules of one folder that other processes may write to: only files that are held in memory."""

    def __init__(self, folder: str, held: Mapping[str, bytes]):
        self.folder, self.held = folder.rstrip("/"), held

    def find_spec(self, fullname: str, target: Any = None) -> Any:
        stem = f"{self.folder}/{fullname.rpartition('.')[2]}"
        for file, inner in ((f"{stem}/__init__.py", [stem]), (f"{stem}.py", None)):
            if file in self.held:
                loader = HeldLoader(fullname, file, self.held)
                return importlib.util.spec_from_file_location(
                    fullname, file, loader=loader, submodule_search_locations=inner
                )
        if any(file.startswith(f"{stem}/") for file in self.held):
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [stem]
            return spec
        return None


class HeldLoader(importlib.machinery.SourceFileLoader):
    """Source from memory, never from bytecode."""

    def __init__(self, fullname: str, path: str, held: Mapping[str, bytes]):
        super().__init__(fullname, path)
        self.held = held

    def get_data(self, path: str) -> bytes:
        if path not in self.held:
            raise OSError(f"{path} is not the tests' own")
        return self.held[path]

    def path_stats(self, path: str) -> Any:
        raise OSError("no bytecode")

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        pass


def guard(workspace: str, own: Mapping[str, bytes]) -> None:
    """From here on nothing that another process may have written is imported, evaluated or unpickled here."""
    held = {f"{workspace}/{path}": data for path, data in own.items()}
    trusted = (sys.prefix, sys.base_prefix, str(Path(__file__).parent.parent))
    plain = list(sys.path_hooks)

    def own_files(folder: str) -> OwnFiles:
        if not folder or f"{folder}/".startswith(tuple(f"{place}/" for place in trusted)):
            raise ImportError
        return OwnFiles(folder, held)

    sys.path_hooks[:] = [own_files, *plain]
    sys.path_importer_cache.clear()
    _guard_loaders(trusted)
    _guard_pytest(workspace, held)
    _guard_texts(workspace)
    _guard_pickles(workspace)


def _guard_loaders(trusted: tuple[str, ...]) -> None:
    """Refuse files that are named to a loader, not found by it: a test may import a file that code wrote."""
    inside = tuple(f"{place}/" for place in trusted)
    read, make = SourceFileLoader.get_data, ExtensionFileLoader.create_module

    def get_data(self: Any, path: str) -> bytes:
        if not str(path).startswith(inside):
            raise ImportError(REFUSED.format("import"))
        return read(self, path)

    def create_module(self: Any, spec: Any) -> Any:
        if not str(self.path).startswith(inside):
            raise ImportError(REFUSED.format("import"))
        return make(self, spec)

    def run_path(*_: Any, **__: Any) -> Any:
        raise RuntimeError(REFUSED.format("run"))

    for kind in (SourceFileLoader, SourcelessFileLoader):
        kind.get_data = get_data  # type: ignore[method-assign]
    ExtensionFileLoader.create_module = create_module  # type: ignore[method-assign]
    runpy.run_path = run_path


def _guard_pytest(workspace: str, held: Mapping[str, bytes]) -> None:
    import _pytest.assertion.rewrite as rewriting

    rewrite_file = rewriting._rewrite_test

    def rewrite_test(file: Path, config: Any) -> Any:
        if str(file).startswith(f"{workspace}/") and str(file) not in held:
            raise ImportError(f"{file} was not there when the session began")
        return rewrite_file(file, config)

    rewriting._rewrite_test = rewrite_test
    # Bytecode lies beside the tests, where the other process writes and reads.
    rewriting._read_pyc = lambda *_: None
    rewriting._write_pyc = lambda *_: False


def _guard_texts(workspace: str) -> None:
    """Evaluation for test files is refused; libraries that evaluate what they wrote themselves go on."""
    for name in ("eval", "exec", "compile"):
        setattr(builtins, name, _guarded(name, getattr(builtins, name), workspace))


def _guarded(name: str, function: Any, workspace: str) -> Any:
    def guarded(source: Any, *arguments: Any, **named: Any) -> Any:
        caller = sys._getframe(1)
        if isinstance(source, str | bytes | bytearray | RemoteType) and caller.f_code.co_filename.startswith(
            workspace
        ):
            raise RuntimeError(REFUSED.format(name))
        if name != "compile" and not arguments and not named:
            return function(source, caller.f_globals, caller.f_locals)
        if name != "compile" and len(arguments) == 1 and not named:
            return function(source, arguments[0])
        return function(source, *arguments, **named)

    guarded.__name__ = guarded.__qualname__ = name
    return guarded


class Unpickler(pickle._Unpickler):  # type: ignore[attr-defined,name-defined]
    """Unpickles values of `values.SAFE`, stand-ins, and instances of classes in the tests' own files."""

    workspace = ""

    def find_class(self, module: str, name: str) -> Any:
        if module == Unpickled.__module__ and name == "Unpickled":
            return Unpickled
        if module == "copyreg" and name in ("_reconstructor", "__newobj__"):
            return super().find_class(module, name)
        with contextlib.suppress(LookupError):
            return believed(module, name)
        found = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        if isinstance(found, RemoteType) or (isinstance(found, type) and file.startswith(self.workspace)):
            return found
        raise pickle.UnpicklingError(REFUSED.format(f"unpickle {module}.{name} from"))


def _guard_pickles(workspace: str) -> None:
    Unpickler.workspace = f"{workspace}/"

    def load(file: Any, **named: Any) -> Any:
        return Unpickler(file, **named).load()

    def loads(data: Any, /, **named: Any) -> Any:
        return Unpickler(io.BytesIO(data), **named).load()

    pickle.load, pickle.loads, pickle.Unpickler = load, loads, Unpickler  # type: ignore[misc,assignment]
