"""Folder of a run on disk: enough to resume it, to grade it again and to report on it.

    runs/NAME/
        recipe.toml        the resolved recipe
        manifest.json      versions, hardware, git revision, seed
        tasks/SET/NAME/    the task folders in use (hard links where the file system allows)
        demonstrations/    copies of what sft and distill learn from, and of what must not be forgotten
        rollouts.jsonl  verdicts.jsonl  hints.jsonl  flags.jsonl  gate.jsonl  oracle.jsonl  metrics.jsonl
        pay.jsonl          auxiliary rewards and effort of each attempt, where a recipe asks for them
        lessons.jsonl      hinted turns as the update saw them, token by token
        pieces.jsonl       the text of every token id that was sampled, so that a reader needs no tokenizer
        checkpoints/NAME/  weights and training state, complete or absent
        report.html

The JSONL files are append-only. Every line is `{"phase", "step", "part", "record"}`; a batch of records is followed
by `{"phase", "step", "part", "done": count}` and counts only once that line is there. What was written and not
completed before a kill is ignored by readers; what was completed is never made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, cast

import orjson

from woodshed.records import RunError, from_json, to_json
from woodshed.runs import links, machine
from woodshed.runs.files import (
    link_or_copy,
    made,
    reason,
    remove,
    staged,
    sweep,
    way_out,
    whole_or_as_before,
    write_atomically,
)

Kind = Literal[
    "rollouts",
    "verdicts",
    "hints",
    "flags",
    "gate",
    "reward_terms",
    "oracle",
    "metrics",
    "divergences",
    "token_texts",
]

At = tuple[str, int, int]  # phase, step, part
Place = tuple[int, int]  # first byte of a batch's records, and the byte behind them
DONE = re.compile(
    rb'\{"phase": (?P<phase>"(?:[^"\\]|\\.)*"), "step": (?P<step>\d+), "part": (?P<part>\d+), '
    rb'"done": (?P<count>\d+)\}\n'
)

SHARED = ("tasks", "demonstrations")
"""Folders of a run that hold hard links to a task set."""
UNREAD = ("wandb",)
"""Folders of trackers, which may link to their own caches."""

R = TypeVar("R")


class DamagedError(RunError, ValueError):
    """Records that cannot be read; also a ValueError, for readers that go on without them."""


class RunDir:
    """One run's folder. Open it with `create` or `open`; only one process may write to it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._not_ours = {path.name for path in path.iterdir()} if path.is_dir() else set[str]()
        self._seen: dict[Kind, tuple[int, dict[At, Place]]] = {}
        self.on_metrics: Callable[[], object] | None = None
        """Called whenever a metrics line was completed."""

    @classmethod
    def create(cls, path: Path, *, recipe: str, manifest: dict[str, Any]) -> RunDir:
        """A new run folder, locked for writing.

        Raises:
            RunError: the folder exists and holds a run, or cannot be written.
        """
        run = cls(path)
        run._refuse_a_second()
        with run._writing(), made(path):
            run.lock()
            run._refuse_a_second()  # another process may have been faster
            try:
                write_atomically(path / "manifest.json", json.dumps(manifest, indent=2) + "\n")
                write_atomically(path / "recipe.toml", recipe)
            except BaseException:
                run.forget()
                raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """A run folder for reading.

        Raises:
            RunError: there is no run at `path`, or something in it is a link to elsewhere; names the run that was
                meant, or the runs beside it.
        """
        if (path / "recipe.toml").is_file():
            links.refuse(path, shared=SHARED, unread=UNREAD)
            return cls(path)
        if path.is_file():
            meant = f"; its run is {path.parent}" if (path.parent / "recipe.toml").is_file() else ""
            raise RunError(f"{path} is a file, and a run is a folder{meant}")
        why = ": the folder holds no recipe.toml" if path.is_dir() else ""
        beside = sorted(p.parent.name for p in path.parent.glob("*/recipe.toml"))
        known = f"; runs there: {', '.join(beside)}" if beside else ""
        raise RunError(f"no run at {path}{why}{known}")

    def lock(self) -> None:
        """Claim the folder for writing until this process ends; what a killed one left unfinished there goes.

        Raises:
            RunError: another process is writing to it, it cannot be written, or something in it is a link to elsewhere.
        """
        links.refuse(self.path, shared=SHARED, unread=UNREAD)
        with self._writing():
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunError(
                f"{self.path} is being written by process {owner}; wait for it or stop it first"
            ) from None
        self._lock = descriptor
        with self._writing():
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            sweep(self.path, *(self.path / name for name in ("checkpoints", "tasks", "demonstrations")))

    def unlock(self) -> None:
        """Let another process write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refuse_a_second(self) -> None:
        if (self.path / "recipe.toml").exists():
            self.unlock()
            raise RunError(
                f"{self.path} already holds a run. Go on with `{self.resuming}`, "
                "or choose another name with `name=OTHER`."
            )

    def forget(self) -> None:
        """Take back a run that this object created, as long as nothing was made in it: its name is free again."""
        if not any(self.path.glob("*.jsonl")) and not (self.path / "checkpoints").exists():
            for name in {"recipe.toml", "manifest.json", "tasks", "demonstrations", "lock"} - self._not_ours:
                remove(self.path / name)
            with suppress(OSError):  # something else is in it
                self.path.rmdir()
        self.unlock()

    def recipe(self) -> dict[str, Any]:
        """The settings of the run, as plain values.

        Raises:
            RunError: the file is damaged.
        """
        path = self.path / "recipe.toml"
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(
                f"{path} cannot be read: {reason(error)}. It holds the settings of the run: restore it, or run anew"
            ) from None

    def section(self, name: str) -> dict[str, Any]:
        """One section of the settings; {} where there is none.

        Raises:
            RunError: the file is damaged.
        """
        found = self.recipe().get(name, {})
        if not isinstance(found, dict):
            raise RunError(f"{self.path / 'recipe.toml'}: {name} = {found!r} should be a section of settings")
        return found

    @property
    def is_evaluation(self) -> bool:
        """True if the run measures a model and trains none; a recipe of training has a table of tasks."""
        try:
            return isinstance(self.recipe().get("tasks"), list)
        except RunError:
            return False

    @property
    def resuming(self) -> str:
        """The command that goes on with this run, on as many ranks as its layout is for."""
        verb = "eval" if self.is_evaluation else "train"
        return f"{machine.command(self._ranks)} {verb} --resume {self.path}"

    @property
    def _ranks(self) -> int:
        try:
            layout = self.section("layout")
            return int(layout.get("fsdp", 1)) * int(layout.get("replicate", 1))
        except (RunError, ValueError, TypeError):
            return 1

    @property
    def manifest(self) -> dict[str, Any]:
        """Manifest of the run; {} if the file was deleted.

        Raises:
            RunError: the file is damaged.
        """
        path = self.path / "manifest.json"
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError(f"it holds {str(found)[:80]!r}")
        except (OSError, ValueError) as error:
            raise RunError(
                f"{path} cannot be read: {error}. Restore it, or delete it to go on without"
            ) from None
        return found

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest.

        Raises:
            RunError: it cannot be written.
        """
        self.write_text("manifest.json", json.dumps(manifest, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replace a file of the run.

        Raises:
            RunError: it cannot be written.
        """
        with self._writing():
            write_atomically(self.path / name, text)

    # -- records ---------------------------------------------------------------------------------------------------

    def once(
        self,
        kind: Kind,
        record: type[R],
        phase: str,
        step: int,
        produce: Callable[[], Iterable[R]],
        *,
        part: int = 0,
    ) -> list[R]:
        """The records of one part of a step: read back if they were completed before, else produced and kept."""
        kept = self.find(kind, record, phase, step, part=part)
        if kept is None:
            kept = list(produce())
            self.append(kind, kept, phase, step, part=part)
        return kept

    def find(self, kind: Kind, record: type[R], phase: str, step: int, *, part: int = 0) -> list[R] | None:
        """The completed records of one part of a step, or None when there are none."""
        at = (phase, step, part)
        place = self._catalog(kind).get(at)
        return None if place is None else self._load(kind, record, at, place)

    def read(
        self, kind: Kind, record: type[R] = dict, *, problems: list[str] | None = None
    ) -> list[tuple[str, int, R]]:
        """All completed records as (phase, step, record), in order; a batch written twice counts once, the last.

        Args:
            problems: receives a sentence for every batch that cannot be read, which is then left out; None raises.

        Raises:
            DamagedError: a batch is damaged, or of another version.
            RunError: the file cannot be read at all.
        """
        return list(self.scan(kind, record, problems=problems))

    def scan(
        self, kind: Kind, record: type[R] = dict, *, problems: list[str] | None = None
    ) -> Iterator[tuple[str, int, R]]:
        """Records as `read` gives them, batch by batch: a run may exceed memory."""
        for at, place in self._catalog(kind).items():
            try:
                found = self._load(kind, record, at, place)
            except DamagedError as error:
                if problems is None:
                    raise
                problems.append(str(error).removeprefix(f"{self.path}/"))
            else:
                for each in found:
                    yield at[0], at[1], each

    def has(self, kind: Kind) -> bool:
        """True if a batch of this kind was completed, even an empty one."""
        return bool(self._catalog(kind))

    def batches(self, kind: Kind) -> list[At]:
        """Positions of completed records as (phase, step, part), in order; `find` reads one."""
        return list(self._catalog(kind))

    def append(self, kind: Kind, records: Iterable[Any], phase: str, step: int, *, part: int = 0) -> None:
        """Write a batch and its completion line in one go.

        Raises:
            RunError: the disk is full or the folder is read-only. What was complete before stays complete.
        """
        at = {"phase": phase, "step": step, "part": part}
        lines = [json.dumps({**at, "record": to_json(record)}, ensure_ascii=False) for record in records]
        lines.append(json.dumps({**at, "done": len(lines)}))
        path = self.path / f"{kind}.jsonl"
        with self._writing(), whole_or_as_before(path), path.open("a+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")  # a torn line stays behind, alone on its line; readers skip it
            file.write(("\n".join(lines) + "\n").encode("utf-8", errors="surrogatepass"))
            file.flush()
            os.fsync(file.fileno())
        if kind == "metrics" and self.on_metrics is not None:
            self.on_metrics()

    def _catalog(self, kind: Kind) -> dict[At, Place]:
        """Position of every completed batch. Reads only what was appended since the last call, without parsing it."""
        path = self.path / f"{kind}.jsonl"
        offset, found = self._seen.get(kind, (0, {}))
        if not path.exists():
            return found
        batch: list[int] = []  # where its records begin
        with self._reading(kind) as file:
            file.seek(offset)
            for line in file:
                done = _completed(line)
                if done is None:
                    batch.append(offset)
                elif (count := done[1]) <= len(batch):
                    found.pop(done[0], None)
                    found[done[0]] = (batch[len(batch) - count] if count else offset, offset)
                offset += len(line)
                if done is not None:
                    batch = []
                    self._seen[kind] = (offset, found)
        return found

    def _load(self, kind: Kind, record: type[R], at: At, place: Place) -> list[R]:
        begin, end = place
        with self._reading(kind) as file:
            file.seek(begin)
            lines = file.read(end - begin).split(b"\n")[:-1]
        return [self._record(kind, record, at, line) for line in lines]

    def _record(self, kind: Kind, record: type[R], at: At, line: bytes) -> R:
        try:
            return _parsed(line, record)
        except (ValueError, KeyError, TypeError) as error:
            where = "{} {} part {}".format(*at)
            why = f"{type(error).__name__}: {error}"
            raise DamagedError(f"{self.path / kind}.jsonl, {where}: {why}") from error

    @contextmanager
    def _reading(self, kind: Kind) -> Iterator[BinaryIO]:
        path = self.path / f"{kind}.jsonl"
        try:
            with path.open("rb") as file:
                yield file
        except OSError as error:
            raise RunError(f"{path} cannot be read: {reason(error)}") from error

    # -- checkpoints and tasks -------------------------------------------------------------------------------------

    def save_checkpoint(self, name: str, fill: Callable[[Path], object]) -> Path:
        """A checkpoint folder that is either complete or absent; `fill` writes the files into a temporary one."""
        target = self.path / "checkpoints" / name
        with self._writing(), staged(target) as partial:
            partial.mkdir()
            fill(partial)
            for file in partial.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
        return target

    def checkpoints(self, prefix: str) -> list[Path]:
        """Complete checkpoints whose name starts with `prefix`, oldest first."""
        return sorted((self.path / "checkpoints").glob(f"{prefix}*"))

    def keep_tasks(self, name: str, folders: Iterable[Path]) -> Path:
        """The run's own copy of a task set, by hard link where possible, so that the run stands alone."""
        target = self.path / "tasks" / name
        if target.exists():
            return target
        with self._writing(), staged(target) as partial:
            partial.mkdir()
            for folder in folders:
                shutil.copytree(folder, partial / folder.name, copy_function=link_or_copy, symlinks=True)
        return target

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kept = f"Nothing that was complete is lost: {way_out(error)}, then"
            begun = os.path.exists(self.path / "recipe.toml")  # noqa: PTH110  # false, too, of a name that is too long
            onward = f"{kept} `{self.resuming}`" if begun else f"Nothing was begun: {way_out(error)}"
            raise RunError(f"cannot write to {self.path}: {reason(error)}. {onward}.") from error


def _completed(line: bytes) -> tuple[At, int] | None:
    """The batch that a completion line completes, and the count of its records; None for any other line."""
    done = DONE.fullmatch(line)
    try:
        return (json.loads(done["phase"]), int(done["step"]), int(done["part"])), int(done["count"])  # type: ignore
    except (TypeError, ValueError):
        return None


def _parsed(line: bytes, record: type[R]) -> R:
    try:
        whole = orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN and lone surrogates, which stand in few lines
        whole = json.loads(line.decode("utf-8", errors="surrogatepass"), parse_int=_integer)
    found = whole.get("record") if isinstance(whole, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{line[:80].decode(errors='replace')!r} is no record")
    return cast("R", found) if record is dict else from_json(record, found)


def _integer(digits: str) -> int | float:
    """An integer as orjson reads it: beyond 64 bits a float."""
    return int(digits) if len(digits) < 20 else float(digits)
