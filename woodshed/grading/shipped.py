"""The grader that a task folder ships: `python shipped.py TESTS WORKSPACE LOGS`, started by tests/test.sh.

It runs in a box of another harness that holds the repository as an attempt left it, and nothing else of the attempt.
What the attempt changed is found by comparing with the files that it was given (TESTS/shown), what may not cross over
is undone, and the verdict is `decision.decide`'s, from runs of the same runner. LOGS/reward.json is written last, when
no process of the code under test is left; it holds the reward, the shaped reward, and how many tests passed.

As root it keeps the code under test away from TESTS and LOGS: that code then runs as another user, and its two runs as
two. Where the kernel grants namespaces, one run has another user also without root, and no TESTS and LOGS
(`other_user`).
Else code that reads /tests finds the hidden tests there, and code that is right only for the user of this box is paid;
a box of one user cannot prevent that, and the log says so.

Standard library and pytest only. The folder of this file's copy holds copies of the modules that it imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from woodshed.grading import results
from woodshed.grading.decision import Files, Planned, decide, reward, session_of, understood
from woodshed.grading.other_user import OtherUser, tops
from woodshed.grading.patches import crossing, protected_paths
from woodshed.grading.results import Kind, Programs, SessionRequest, TestRun
from woodshed.pysource import syntax
from woodshed.pysource.api_compat import Api, ModuleApi
from woodshed.records import Patch, Task, Verdict, from_json
from woodshed.tasks.contents import hidden_tests, is_allowed, isolated_tests, lay_out_for_grading, shown_files
from woodshed.tasks.paths import is_protected

REWARDS = ("reward.json", "reward.txt")
CAUSED = 3
"""Exit code where grading failed once the code under test had run; tests/test.sh writes a reward of 0 then."""
NOBODY = 65534
"""User and group of the code under test, where this program is root; the one below it in another run than the ordinary
one."""
ONE_USER = "both runs of the tests have one user and one view of this box: it grants no other"
MAX_FILE_BYTES = 1 << 20
"""Of a file of a patch; as `rollout` bounds it."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: what the code under test leaves running becomes a child of this process."""
DUMPABLE = 4
"""PR_SET_DUMPABLE: at 0, neither ptrace nor /proc reach the memory of this process, which holds the hidden tests."""
HURRY_S, PATIENCE_S = 0.5, 10.0
"""For ending what a session left running: one by one, and at all."""


def grade(tests: Path, workspace: Path, logs: Path) -> None:
    """Grade the attempt that lies in the workspace and write the reward.

    Raises:
        SystemExit: `CAUSED`.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files may be odd
    known = json.loads((tests / "expected.json").read_text("utf-8"))
    scratch = Path(tempfile.mkdtemp(prefix=""))
    task = _task(known, tests, scratch)
    box = OneBox(task, tests, workspace, scratch, known)
    try:
        box.find_other_user(logs)
        _graded(task, box, logs)
    except Exception as error:
        if not box.has_run:
            raise
        traceback.print_exception(error)
        sys.exit(CAUSED)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _graded(task: Task, box: OneBox, logs: Path) -> None:
    """Write the reward that the runs of a box add up to."""
    isolated = box.isolated_tests()
    with closed_to_others(box.tests), closed_to_others(logs):
        crossed, left = crossing(task, box.patch())
        verdict = decide(task, crossed, left, box, timeout_s=task.verify_timeout_s, shaped=True)
    alone = () if box.is_separate or box.other else (ONE_USER,)
    outcomes = [f"{test}: {outcome}" for test, outcome in verdict.outcomes.items()]
    for line in (*alone, *verdict.integrity, *outcomes):
        print(line)
    print(verdict.detail)
    for name in REWARDS:  # those that the code under test may have left
        (logs / name).unlink(missing_ok=True)
    (logs / REWARDS[0]).write_text(json.dumps(_written(task, verdict, isolated)) + "\n", encoding="utf-8")


def _task(known: Mapping[str, Any], tests: Path, scratch: Path) -> Task:
    """The task, in a folder that looks like the one it was made in, without what the box may not hold."""
    home = scratch / "task"
    lay_out_for_grading(tests, home)
    own = {key: value for key, value in known.items() if key not in ("task", "api", "isolated")}
    return from_json(Task, {**known["task"], **own, "id": "", "name": "", "folder": str(home)})


def _written(task: Task, verdict: Verdict, isolated: Sequence[str]) -> dict[str, float | int | None]:
    """The contents of reward.json. Where the box is at fault the reward is null: no number, so no reward."""
    passed = sum(outcome == "passed" for outcome in verdict.outcomes.values())
    if verdict.status == "invalid":
        return {"reward": None}
    return {
        "reward": float(verdict.reward == 1.0),
        "shaped": reward(task, verdict.outcomes, verdict.integrity, isolated, shaped=True),
        "passed": passed,
        "tests": len(verdict.outcomes),
    }


@dataclass
class OneBox:
    """See `decision.Box`: runs follow each other in one workspace, which is laid out anew for each."""

    task: Task
    tests: Path
    workspace: Path
    scratch: Path
    known: Mapping[str, Any]
    found: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Files of the workspace as it was handed over: mode and bytes; for a symlink, where it leads."""
    folders: list[str] = field(default_factory=list)
    """Folders of the workspace as it was handed over."""
    other: OtherUser | None = None
    """Of the runs that are not ordinary ones."""
    has_run: bool = False
    """Code under test has run: what fails from now on may be its doing."""

    def __post_init__(self) -> None:
        self.is_separate = can_separate()
        self.found = dict(_contents(self.workspace))
        inner = (place for place in self.workspace.rglob("*") if place.is_dir() and not place.is_symlink())
        self.folders = [place.relative_to(self.workspace).as_posix() for place in inner]
        if self.is_separate:
            self.scratch.chmod(0o755)
        libc = ctypes.CDLL(None)
        libc.prctl(SUBREAPER, 1, 0, 0, 0)
        libc.prctl(DUMPABLE, 0, 0, 0, 0)

    def find_other_user(self, logs: Path) -> None:
        """Look for another user and view of the box, for one of the two runs."""
        root = self.scratch / "root"
        root.mkdir()
        if self.is_separate:
            os.chown(root, NOBODY - 1, NOBODY - 1)
        needed = (self.workspace, self.scratch, Path(sys.prefix), Path(sys.base_prefix))
        other = OtherUser(root, tops((self.tests, logs), needed), self.workspace, self._user("isolated"))
        self.other = other if other.is_possible() else None

    def _user(self, kind: Kind) -> int | None:
        """The user that a run of some kind has where this is root."""
        return NOBODY - (kind != "ordinary") if self.is_separate else None

    def patch(self) -> Patch:
        """The changes of the attempt to the files that it was allowed to change."""
        shown = dict(_contents(shown_files(self.tests)))
        files: dict[str, str | None] = {}
        skipped: dict[str, str] = {}
        for path in sorted(shown.keys() | self._allowed()):
            mode, data = self.found.get(path, (0, b""))
            if path in self.found and shown.get(path, (0, None))[1] == data:
                continue
            if path not in self.found:
                files[path] = None
            elif not stat.S_ISREG(mode) or len(data) > MAX_FILE_BYTES:
                skipped[path] = "not a regular file" if not stat.S_ISREG(mode) else "too large"
            else:
                try:
                    files[path] = syntax.read(path, data)
                except syntax.UnreadableError as error:
                    skipped[path] = str(error)
        return Patch(files, skipped)

    def runs(self, crossed: Files, planned: Sequence[Planned]) -> Generator[TestRun, None, None]:
        for one in planned:
            yield self._run(crossed, *one)

    def _run(self, crossed: Files, tests: Sequence[str], timeout_s: float, kind: Kind) -> TestRun:
        request, disguise = session_of(self.task, crossed, tests, kind)
        hidden = dict(_contents(hidden_tests(self.task)))
        shown = dict(_contents(shown_files(self.tests)))
        allowed = self._allowed() | shown.keys()
        tree = {p: kept for p, kept in self.found.items() if p not in allowed and not is_protected(p)}
        tree |= shown
        tree |= {p: (0o100644, data) for p, data in crossed.items() if data is not None}
        tree |= hidden | dict.fromkeys(request.sources, (0o100644, b""))
        tree = {p: kept for p, kept in tree.items() if p in hidden or crossed.get(p, b"") is not None}
        self._lay(tree, self._user(kind))
        before = self._states()
        run = self._session(request, timeout_s)
        after = self._states()
        return understood(run, disguise, [path for path in before if before[path] != after[path]])

    def original_api(self) -> Api:
        return {stem: from_json(ModuleApi, known) for stem, known in self.known["api"].items()}

    def isolated_tests(self) -> Sequence[str]:
        known = isolated_tests(self.task)
        return () if known is None else known[1]

    def _allowed(self) -> set[str]:
        """Files of the handed-over workspace at or below the allowed paths."""
        return {path for path in self.found if is_allowed(self.task, path)}

    def _lay(self, tree: Mapping[str, tuple[int, bytes]], user: int | None) -> None:
        """Make the workspace hold these files and nothing else, in folders that the code under test may write to."""
        for place in self.workspace.iterdir():
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink()
        for path in self.folders:  # the empty ones as well; none in the place of a file
            if tree.keys().isdisjoint([path, *map(str, PurePosixPath(path).parents)]):
                (self.workspace / path).mkdir(parents=True, exist_ok=True)
        for path, (mode, data) in tree.items():
            target = self.workspace / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISLNK(mode):
                target.symlink_to(os.fsdecode(data))
            else:
                target.write_bytes(data)
                target.chmod(0o755 if mode & 0o100 else 0o644)
        if user is not None:
            for place in (self.workspace, *self.workspace.rglob("*")):
                os.chown(place, user, user, follow_symlinks=False)

    def _states(self) -> dict[str, tuple[int, ...]]:
        """The marks of each protected file that change when somebody writes to, replaces, moves or removes it."""
        found: dict[str, tuple[int, ...]] = {}
        for path in map(str, protected_paths(self.task)):
            with contextlib.suppress(OSError):
                state = (self.workspace / path).lstat()
                found[path] = (
                    state.st_ino,
                    state.st_mode,
                    state.st_size,
                    state.st_mtime_ns,
                    state.st_ctime_ns,
                )
            found.setdefault(path, ())
        return found

    def _session(self, request: SessionRequest, timeout_s: float) -> TestRun:
        """One session of the runner; nothing that it started is left when this returns."""
        nonce, began = secrets.token_hex(16), time.monotonic()
        programs = self._programs(request)
        environment = {**os.environ, "PYTHONPATH": "", **({"HOME": "/tmp"} if self.is_separate else {})}
        environment[request.programs.python_path] = environment.pop("WOODSHED_PYTHONPATH", "")
        environment |= results.ENVIRONMENTS[request.kind]
        for name in results.UNSET[request.kind]:
            environment.pop(name, None)
        environment["PYTHONHASHSEED"] = str(results.HASH_SEEDS[request.kind])
        self.has_run = True
        user, ended = self._user(request.kind), "ok"
        enter = self.other.enter if self.other and request.kind != "ordinary" else None
        with tempfile.TemporaryFile() as channel:
            child = subprocess.Popen(
                [sys.executable, "-s", *results.FLAGS[request.kind], str(programs)],
                stdin=subprocess.PIPE,
                pass_fds=[channel.fileno()],
                env=environment,
                start_new_session=True,
                preexec_fn=enter,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
            try:
                told = request.encoded(nonce, str(self.workspace), channel=channel.fileno())
                child.communicate(told, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                ended = "timeout"
            end_children()
            child.wait()
            shutil.rmtree(programs.parent, ignore_errors=True)
            channel.seek(0)
            report = results.read(channel.read(), nonce)
        seconds = time.monotonic() - began
        return results.test_run(report, request.ids, ended=ended, seconds=seconds, log="")

    def _programs(self, request: SessionRequest) -> Path:
        """The runner, in a new folder with all that it needs; the code under test may not look into TESTS."""
        names = request.programs
        folder = self.scratch / Path(names.folder).name
        folder.mkdir()
        ours = Programs().files()
        kept = {file: self.tests / name for name, file in ours.items()}
        for name, file in names.files().items():
            copy = shutil.copytree if kept[file].is_dir() else shutil.copyfile
            copy(kept[file], folder / name)
        return folder / f"{names.runner}.py"


def can_separate() -> bool:
    """True where this is root, and another user can run the tests' Python."""
    if os.getuid() != 0:
        return False
    command = [sys.executable, "-P", "-s", "-B", "-c", "import pytest"]
    with contextlib.suppress(OSError):  # it may not even look into the folder of the interpreter
        done = subprocess.run(
            command,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            env={"PATH": os.defpath},
            cwd="/",
            check=False,
        )
        return done.returncode == 0
    return False


def end_children() -> None:
    """Kill every process that descends from this one. Orphans become its children, so that none is out of reach.

    Some relieve each other faster than they are found here. So whatever this user may signal is stopped in one pass of
    the kernel, this process alone excepted, until none is left; then the others go on.
    """
    began = time.monotonic()
    while _children() and time.monotonic() < began + HURRY_S:
        _kill(_children())
    if not _children():
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)
    try:
        while (children := _children()) and time.monotonic() < began + PATIENCE_S:
            _kill(children)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT)


def _kill(children: Sequence[int]) -> None:
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.001)
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    """Processes whose parent is this one, ended or not; one read, where the kernel lists them."""
    listed = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    if listed.exists():
        return [int(word) for word in listed.read_text().split()]
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                found += [int(place.name)] if int(parent) == os.getpid() else []
    return found


@contextlib.contextmanager
def closed_to_others(folder: Path) -> Iterator[None]:
    """A folder that only root can look into, where this is root; as it was again afterwards."""
    if os.getuid() != 0:
        yield
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    with contextlib.suppress(OSError):  # mounted read-only
        folder.chmod(0o700)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.chmod(mode)


def _contents(root: Path) -> Iterator[tuple[str, tuple[int, bytes]]]:
    """Path, mode and bytes of every file and symlink below a folder; anything else is passed over."""
    for here, folders, names in os.walk(root):
        links = [name for name in folders if Path(here, name).is_symlink()]
        for name in (*names, *links):
            file = Path(here, name)
            mode = file.lstat().st_mode
            if stat.S_ISLNK(mode):
                yield file.relative_to(root).as_posix(), (mode, os.fsencode(file.readlink()))
            elif stat.S_ISREG(mode):
                yield file.relative_to(root).as_posix(), (mode, file.read_bytes())


if __name__ == "__main__":
    grade(*(Path(argument) for argument in sys.argv[1:4]))
