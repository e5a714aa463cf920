"""Runs pytest where untrusted code runs, and reports through a pipe. Standard library and pytest only.

What pytest prints, writes and exits with can be forged by the code under test: of 14 planted cheats 12 fooled an exit
code and 6 fooled a log or JUnit parser. So pytest is driven from here, from outside the workspace:

- the request, with a nonce, arrives on stdin, which is closed before any test code is imported;
- results leave through an inherited descriptor, one line each, every line led by the nonce: a start record, one
  record for each test, and an end record that counts them;
- the tests at the bottom of this file run last in the same session and must fail: failing still works. They are not
  collected, so that no option, mark, fixture or conftest of the project can rename, deselect, change or break them;
- every function of pytest and unittest must be after the run what it was before it, and every hook must come from
  the environment or from the project's tests;
- comparisons that the tests make are doubted (`assert_hardening`): what is equal to everything passes nothing;
- the text of test files arrives with the request, and on disk they are empty: nobody looks up an answer there;
- plugins are the environment's own, by name, loaded before the workspace is on sys.path; no addopts, no cache, and no
  plugin is missed that the environment lacks.

- in an isolated session the packages are in another process (`process_isolation`), which is told nothing of all this.

What an ordinary session cannot stop is code in the same process that searches memory for the nonce. So what is paid
passed in an isolated one, or beside decoys. `results.read` is the other side.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import _pytest.assertion.rewrite as rewriting
import _pytest.runner
import _pytest.tmpdir
import pytest
from _pytest.fixtures import FuncFixtureInfo

INI_FILES = (
    "pytest.toml",
    ".pytest.toml",
    "pytest.ini",
    ".pytest.ini",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
)
IMPORT_MODE = re.compile(r"--import-mode[=\s\"',]+(prepend|append|importlib)")
SEVERITY = ("passed", "xpassed", "xfailed", "skipped", "failed", "error")
SHUFFLERS = {"randomly"}
"""Plugins that change the order of tests as soon as they are loaded."""
ONCE = {"benchmark": "--benchmark-disable", "rerunfailures": "--reruns=0"}
"""Plugins that repeat a test, to measure its speed or until it passes, and the option that lets them run it once."""
HARMLESS = ("ignore::pytest.PytestAssertRewriteWarning", "ignore::pytest.PytestConfigWarning")
"""Warnings about plugins that are named like modules, or not there: `filterwarnings = error` ends a session by them."""
WATCHED = ("_pytest", "pytest", "pluggy", "unittest")


class Recorder:
    """The pytest plugin that sees every test and tells the channel."""

    def __init__(
        self, channel: int, nonce: str, wanted: list[str] | None, packages: list[str], workspace: str
    ):
        self.python_path = ""
        self.is_turned = False
        """The last group of tests runs first."""
        self.wanted = None if wanted is None else frozenset(wanted)
        self.files = files_of(wanted or [], workspace)
        self.hooks: object = None
        self.packages, self.workspace = packages, workspace
        self.count = 0
        self.before: dict[str, object] = {}
        self.sentinels: dict[str, str] = {}
        self.open: dict[str, dict] = {}
        owner = os.getpid()

        def send(kind: str, **values: object) -> None:
            if os.getpid() != owner:  # a test forked: the copy must not report
                return
            line = f"{nonce} {json.dumps({'kind': kind, **values})}\n".encode()
            while line:
                line = line[os.write(channel, line) :]

        self.send = send

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        """pytest and its plugins are imported; from here on, code of the repository runs."""
        gc.enable()
        self.before = framework()
        self.send("start")
        del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        place = next((i for i, entry in enumerate(sys.path) if "-packages" in entry), len(sys.path))
        python_path = os.environ.pop("WOODSHED_PYTHONPATH", self.python_path)
        # Behind the standard library, so that no file of the workspace can stand in for one of its modules.
        sys.path[place:place] = [*filter(None, python_path.split(":")), self.workspace]
        os.environ["PYTHONPATH"] = python_path

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """No file means no test; pytest would take it for the whole suite."""
        self.hooks = config.pluginmanager.hook
        if self.wanted is not None:
            config.args[:] = self.files

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        """Only the wanted tests, whatever plugins made of the list; sentinels last, unless the session broke off."""
        session.items = [i for i in session.items if self.wanted is None or i.nodeid in self.wanted]
        if self.is_turned:
            session.items = turned(session.items)
        ours = sentinels(session)
        self.sentinels = {item.nodeid: item.name for item in ours}
        outcome = yield
        if outcome.excinfo is None:  # type: ignore[attr-defined]
            manager = session.config.pluginmanager
            hidden = {plugin for _, plugin, path in hooked(self.hooks) if is_test(path, self.workspace)}
            for item in ours:
                item.hooks = Hooks(manager, hidden)
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.send("collection", path=report.nodeid, message=str(report.longrepr)[-2000:])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.open.setdefault(report.nodeid, {"outcome": "", "seconds": 0.0, "message": ""})
        outcome = outcome_of(report)
        test["seconds"] += report.duration
        if outcome and (not test["outcome"] or rank(outcome) >= rank(test["outcome"])):
            test["outcome"] = outcome
            test["message"] = "" if outcome == "passed" else why(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """People who read the log are not shown the failures that must be."""
        return ("", "", "") if report.nodeid in self.sentinels else None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        test = self.open.pop(nodeid, None)
        if test is None or not test["outcome"]:
            return
        if nodeid in self.sentinels:
            self.send("sentinel", name=self.sentinels[nodeid], outcome=test["outcome"])
            return
        self.count += 1
        self.send("test", id=nodeid, **{**test, "seconds": round(test["seconds"], 4)})

    def end(self) -> None:
        after = framework()
        patched = [name for name, was in self.before.items() if not same(was, after.get(name))]
        patched += foreign_hooks(self.hooks, self.workspace) if self.hooks else []
        packages = {name: imported_from(name, self.workspace) for name in self.packages}
        self.send("end", count=self.count, workspace=self.workspace, packages=packages, patched=patched)


def turned(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests of one class or module in their order, the last of these groups first."""
    groups = [list(group) for _, group in itertools.groupby(items, lambda item: item.parent)]
    return [item for group in reversed(groups) for item in group]


class Hooks:
    """The hooks of pytest, as all plugins but the hidden ones implement them."""

    def __init__(self, manager: pytest.PytestPluginManager, hidden: set[object]):
        self.manager, self.hidden = manager, hidden

    def __getattr__(self, name: str) -> Callable[..., object]:
        return self.manager.subset_hook_caller(name, remove_plugins=self.hidden)


class Sentinel(pytest.Function):
    """A test that must fail. pytest and the environment's plugins run it, without the hooks of the project's tests."""

    hooks: Hooks

    @property
    def ihook(self) -> Hooks:  # type: ignore[override]
        return self.hooks


def sentinels(session: pytest.Session) -> list[Sentinel]:
    """The tests of this file, made by hand: no naming option finds them, no autouse fixture is theirs."""
    module = pytest.Module.from_parent(session, path=Path(__file__))
    found = []
    for name, function in list(vars(module.obj).items()):
        if name.startswith("test_sentinel_"):
            nothing = FuncFixtureInfo(argnames=(), initialnames=(), names_closure=[], name2fixturedefs={})
            item = Sentinel.from_parent(module, name=name, callobj=function, fixtureinfo=nothing)
            item.add_marker(
                pytest.mark.filterwarnings("ignore")
            )  # what a test leaves behind may warn in the next
            found.append(item)
    return found


def outcome_of(report: pytest.TestReport) -> str:
    """The outcome that one phase gives its test; "" for none."""
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped:
        return "xfailed" if expected_failure else "skipped"
    if report.when != "call":
        return "error" if report.failed else ""
    return "xpassed" if report.passed and expected_failure else report.outcome


def rank(outcome: str) -> int:
    return SEVERITY.index(outcome) if outcome in SEVERITY else SEVERITY.index("failed")


def why(report: pytest.TestReport) -> str:
    """The place and message at which a test stopped, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(report.longrepr, tuple):
        text = "{}:{}: {}".format(*report.longrepr)
    else:
        text = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)
    return text.partition("\n")[0][:500]


def imported_from(package: str, workspace: str) -> str:
    """The file of a package, or of the first of its modules that is not the workspace's; "" if not imported."""
    modules = [sys.modules.get(package)]
    modules += [module for name, module in list(sys.modules.items()) if name.startswith(package + ".")]
    files = [file for module in modules if isinstance(file := getattr(module, "__file__", None), str)]
    return next((file for file in files if not file.startswith(workspace + "/")), files[0] if files else "")


def framework() -> dict[str, object]:
    """Every function that tests are run with, by name, and its code."""
    found: dict[str, object] = {f"builtins.{k}": v for k, v in vars(builtins).items() if k != "_"}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in WATCHED or not isinstance(module, types.ModuleType):
            continue
        classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name]
        for owner in (module, *classes):
            place = name if owner is module else f"{name}.{owner.__qualname__}"
            for key, value in list(vars(owner).items()):
                function = getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    found[f"{place}.{key}"] = (function, function.__code__)
    return found


def same(was: object, now: object) -> bool:
    if isinstance(was, tuple) and isinstance(now, tuple):
        return all(a is b for a, b in zip(was, now, strict=True))
    return was is now


def hooked(hooks: object) -> Iterator[tuple[str, object, Path]]:
    """Every implementation of a hook: the hook's name, the plugin, the file that the code is from."""
    for name, caller in vars(hooks).items():
        for hook in caller.get_hookimpls():
            code = getattr(getattr(hook.function, "__func__", hook.function), "__code__", None)
            yield name, hook.plugin, Path(code.co_filename if code else sys.prefix)


def is_test(path: Path, workspace: str) -> bool:
    """True if a file is one of the project's tests, which no patch can change."""
    if not path.is_relative_to(workspace):
        return False
    parts = path.relative_to(workspace).parts
    return path.name == "conftest.py" or not {"test", "tests", "testing"}.isdisjoint(parts)


def foreign_hooks(hooks: object, workspace: str) -> list[str]:
    """Hooks into pytest that are neither the environment's nor the project's tests'."""
    return [
        f"{name} in {path}"
        for name, _, path in hooked(hooks)
        if not (path == Path(__file__) or path.is_relative_to(sys.prefix) or is_test(path, workspace))
    ]


def plugin_names() -> list[str]:
    """pytest plugins of the environment, by entry point; the repository is not on sys.path yet."""
    return sorted({point.name for point in entry_points(group="pytest11")} - SHUFFLERS)


def files_of(tests: list[str], workspace: str) -> list[str]:
    """The files of some test ids, once each, as far as they exist: one that does not would end the session.

    pytest takes a bracket for the parameters of a test, so a file below such a folder is named by the folder around it.
    """
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    there = [file for file in files if Path(workspace, file).is_file()]
    named = dict.fromkeys(
        str(Path(file.partition("[")[0] + "x").parent) if "[" in file else file for file in there
    )
    return [
        f"./{name}" if name.startswith(("-", "@")) else name for name in named
    ]  # no options, no lists of them


def arguments(request: dict) -> list[str]:
    """Command line of the one pytest session."""
    workspace = request["workspace"]
    options = ["--rootdir", workspace, "--confcutdir", workspace, "--continue-on-collection-errors"]
    options += ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "required_plugins="]
    options += [
        "-q",
        "--tb=native",
        "--color=no",
        "--no-header",
        *(word for w in HARMLESS for word in ("-W", w)),
    ]
    for name in INI_FILES:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if mode := IMPORT_MODE.search(Path(workspace, name).read_text("utf-8")):
                options += ["--import-mode", mode[1]]
                break
    for name in plugin_names():
        options += ["-p", name, *filter(None, [ONCE.get(name)])]
    return [*options, *request.get("options", []), *files_of(request["ids"] or [], workspace)]


def beside(name: str) -> types.ModuleType:
    """A module that lies beside this file."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def rewrite_all(files: list[str]) -> None:
    """Let pytest rewrite asserts of all modules of the tests, also of those that hold none themselves, and believe no
    bytecode of them."""
    hook, read = rewriting.AssertionRewritingHook, rewriting._read_pyc
    skips, takes = hook._early_rewrite_bailout, hook._should_rewrite
    stems = {file.removesuffix("/__init__.py").removesuffix(".py").rpartition("/")[2] for file in files}

    def early_rewrite_bailout(self: Any, name: str, state: Any) -> bool:
        return name.rpartition(".")[2] not in stems and skips(self, name, state)

    def should_rewrite(self: Any, name: str, file: str, state: Any) -> bool:
        return file in files or takes(self, name, file, state)

    hook._early_rewrite_bailout, hook._should_rewrite = early_rewrite_bailout, should_rewrite  # type: ignore
    rewriting._read_pyc = lambda file, *rest: None if str(file) in files else read(file, *rest)


def move() -> None:
    """Other surroundings than those of an agent's commands: temporary files lie elsewhere."""
    os.environ["TMPDIR"] = tempfile.mkdtemp()
    tempfile.tempdir = None


def isolate(request: dict, sources: dict[str, str], python_path: str, hardening: types.ModuleType) -> None:
    """Have the packages in another process. Own files are read now: that process could change them later."""
    workspace = Path(request["workspace"])
    own = {path: (workspace / path).read_bytes() for path in request["own"] if (workspace / path).is_file()}
    own |= {path: text.encode("latin-1") for path, text in sources.items()}
    program = beside(f"{request['programs']['isolation']}.tests_side")
    program.install(str(workspace), request["packages"], python_path, own, hardening)


def main() -> None:
    """One session: the request on stdin, results on descriptor 3 (or the one that the request names)."""
    if not sys.flags.safe_path:
        sys.path.pop(0)
    request = json.loads(sys.stdin.buffer.read())
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    given = request.get("channel", 3)
    least = 64 + os.urandom(1)[0]
    channel = fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, least)  # children of the tests do not inherit it
    os.close(given)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    _pytest.runner._update_current_test_var = lambda item, when: None  # ids hold parameters: expected values
    _pytest.tmpdir._mk_tmp = lambda request, factory: factory.mktemp("test")  # code is told the path
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.chdir(request["workspace"])
    names = request["programs"]
    python_path = os.environ.pop(names["python_path"], "")
    sources = request.pop("sources", {})
    compiled = request.pop("compiled", {})
    hardening = beside(names["hardening"])
    hardening.install(request["workspace"], request.get("patched", {}), sources, compiled)
    rewrite_all([f"{request['workspace']}/{path}" for path in request.get("own", [])])
    if request["kind"] == "ordinary":
        move()
    if request["kind"] == "isolated":
        isolate(request, sources, python_path, hardening)
    recorder = Recorder(channel, request["nonce"], request["ids"], request["packages"], request["workspace"])
    recorder.python_path = python_path
    recorder.is_turned = request["kind"] != "ordinary"
    code = pytest.main(arguments(request), plugins=[recorder])
    if recorder.before:
        if code == pytest.ExitCode.USAGE_ERROR and not recorder.sentinels:
            recorder.send("collection", path="", message="pytest ended before any test")
        recorder.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and atexit handlers of the code under test have no say any more


def test_sentinel_assertion() -> None:
    assert 1 == 2


def test_sentinel_exception() -> None:
    raise RuntimeError("this test must fail")


def test_sentinel_expectation() -> None:
    with pytest.raises(ValueError):
        pass


if __name__ == "__main__":
    main()
