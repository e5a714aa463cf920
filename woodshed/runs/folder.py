"""Folder of a run: everything to resume it, to grade it again and to report on it.

    runs/NAME/
        recipe.toml        the resolved recipe
        manifest.json      versions, hardware, git revision, seed
        tasks/SET/NAME/    the task folders in use (hard links where the file system allows)
        demonstrations/    copies of the data of sft and distill, and of earlier answers that measure forgetting
        rollouts.jsonl  verdicts.jsonl  hints.jsonl  flags.jsonl  gate.jsonl  oracle.jsonl  metrics.jsonl
        reward_terms.jsonl  auxiliary rewards and effort of each attempt, if the recipe has them
        divergences.jsonl  divergence of hinted turns in the update, token by token
        solutions.jsonl    decisions of the person whose requests the attempts are (`woodshed solve`)
        token_texts.jsonl  text of every sampled token id, so that a reader needs no tokenizer
        checkpoints/NAME/  weights and training state, complete or absent
        report.html

and, where a collector and a trainer share it (`stages.asynchronous`):

        draws.jsonl        tasks of each step, and the choice of tasks after it
        turns/ID.jsonl     messages of attempts in the middle
        collected.jsonl    steps and evaluations of which everything is there
        published.jsonl    weights for the engines, in weights/
        taken.jsonl        groups that the checkpoints have learned from
        processes.json  logs/   its processes, and what each said

The JSONL files are append-only. Every line is `{"phase", "step", "part", "record"}`; a batch of records is followed
by `{"phase", "step", "part", "done": count}` and is complete only with that line. Readers ignore incomplete batches;
complete ones are never repeated.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import orjson

from woodshed import documents
from woodshed.records import RunError, from_json, to_json
from woodshed.runs import links, machine
from woodshed.runs.files import (
    created,
    link_or_copy,
    reason,
    remove,
    restored_on_error,
    staged,
    sweep,
    way_out,
    write_atomically,
)
from woodshed.runs.kinds import OF_COLLECTOR, Kind, Writer
from woodshed.runs.pace import Pace

BatchId = tuple[str, int, int]  # phase, step, part
Span = tuple[int, int]  # first byte of a batch's records, and the byte after them
DONE = re.compile(
    rb'\{"phase": (?P<phase>"(?:[^"\\]|\\.)*"), "step": (?P<step>\d+), "part": (?P<part>\d+), '
    rb'"done": (?P<count>\d+)\}\n'
)

SHARED = ("tasks", "demonstrations")
"""Folders of a run that may have hard links to a task set."""
UNREAD = ("wandb",)
"""Folders of trackers, which may have links to their own caches."""

R = TypeVar("R")


class DamagedError(RunError, ValueError):
    """Damaged records; also a ValueError, for readers that skip them."""


class RunDir:
    """One run's folder. Open it with `create` or `open`; only one process may write to it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._writer: Writer = "run"
        self._not_ours = {path.name for path in path.iterdir()} if path.is_dir() else set[str]()
        self._seen: dict[Kind, tuple[int, dict[BatchId, Span]]] = {}
        self.on_metrics: Callable[[], object] | None = None
        """Called after every line of metrics."""

    @classmethod
    def create(cls, path: Path, *, recipe: str, manifest: dict[str, Any]) -> RunDir:
        """A new run folder, locked for writing.

        Raises:
            RunError: the folder already has a run, or cannot be written.
        """
        run = cls(path)
        run._refuse_a_second()
        with run._writing(), created(path):
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
            RunError: no run at `path`, or a link in it leads outside; suggests other runs.
        """
        if (path / "recipe.toml").is_file():
            links.refuse(path, shared=SHARED, unread=UNREAD)
            return cls(path)
        if path.is_file():
            suggestion = f"; its run is {path.parent}" if (path.parent / "recipe.toml").is_file() else ""
            raise RunError(f"{path} is a file, and a run is a folder{suggestion}")
        detail = ": the folder has no recipe.toml" if path.is_dir() else ""
        siblings = sorted(p.parent.name for p in path.parent.glob("*/recipe.toml"))
        known = f"; runs there: {', '.join(siblings)}" if siblings else ""
        raise RunError(f"no run at {path}{detail}{known}")

    def lock(self, writer: Writer = "run") -> None:
        """Lock the folder for writing until this process ends, and remove unfinished files of killed processes.

        Args:
            writer: the part of the folder that this process writes.

        Raises:
            RunError: another process is writing to it, it cannot be written, or a link in it leads outside.
        """
        links.refuse(self.path, shared=SHARED, unread=UNREAD)
        with self._writing():
            name = "lock" if writer == "run" else f"lock-{writer}"
            descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunError(
                f"{self.path} is being written by process {owner}; wait for it or stop it first"
            ) from None
        self._lock, self._writer = descriptor, writer
        with self._writing():
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            sweep(self.path, *(self.path / name for name in ("checkpoints", "tasks", "demonstrations")))

    def unlock(self) -> None:
        """Release the lock, so that another process can write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refuse_a_second(self) -> None:
        if (self.path / "recipe.toml").exists():
            self.unlock()
            raise RunError(
                f"{self.path} already has a run. Resume it with `{self.resuming}`, "
                "or choose another name with `name=OTHER`."
            )

    def forget(self) -> None:
        """Remove a run that this object created, if it has no results yet, so that its name is free again."""
        if not any(self.path.glob("*.jsonl")) and not (self.path / "checkpoints").exists():
            for name in {"recipe.toml", "manifest.json", "tasks", "demonstrations", "lock"} - self._not_ours:
                remove(self.path / name)
            with suppress(OSError):  # it has other files
                self.path.rmdir()
        self.unlock()

    def recipe(self) -> dict[str, Any]:
        """The settings of the run, as plain values.

        Raises:
            RunError: the file is damaged.
        """
        path = self.path / "recipe.toml"
        remedy = "It has the settings of the run: restore it, or start another run"
        try:
            return documents.read_toml(path, RunError, remedy)
        except FileNotFoundError:
            raise RunError(f"{path} is not there. {remedy}") from None

    def section(self, name: str) -> dict[str, Any]:
        """One section of the settings; {} if there is none.

        Raises:
            RunError: the file is damaged.
        """
        section = self.recipe().get(name, {})
        if not isinstance(section, dict):
            raise RunError(
                f"{self.path / 'recipe.toml'}: {name} = {section!r} should be a section of settings"
            )
        return section

    @property
    def is_evaluation(self) -> bool:
        """True for an evaluation. In its recipe `tasks` is a list; in one for training it is a table."""
        try:
            return isinstance(self.recipe().get("tasks"), list)
        except RunError:
            return False

    @property
    def resuming(self) -> str:
        """The command that resumes this run, with the number of ranks of its layout."""
        verb = "eval" if self.is_evaluation else "train"
        return f"{machine.command(self._ranks)} {verb} --resume {shlex.quote(str(self.path))}"

    @property
    def _ranks(self) -> int:
        try:
            layout = self.section("layout")
            if self.section("rl").get("staleness"):  # `woodshed train` starts the ranks
                return 1
            return math.prod(int(layout.get(axis, 1)) for axis in ("fsdp", "replicate", "cp"))
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
        remedy = "Restore it, or delete it to continue without it"
        manifest = documents.read_json(path, RunError, remedy)
        if not isinstance(manifest, dict):
            raise RunError(f"{path} cannot be read: it has {str(manifest)[:80]!r}. {remedy}")
        return manifest

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest.

        Raises:
            RunError: it cannot be written.
        """
        self.write_text("manifest.json", json.dumps(manifest, indent=2) + "\n")

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the wall seconds of the work inside to the manifest ("wall_s"). A killed process leaves its own out."""
        pace = Pace()
        try:
            yield
        finally:
            with suppress(RunError):  # whatever ended the work is the message
                manifest = self.manifest
                self.write_manifest(manifest | {"wall_s": manifest.get("wall_s", 0.0) + pace.seconds()})

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
        """The records of one part of a step: read if they were completed before, else produced and stored."""
        records = self.find(kind, record, phase, step, part=part)
        if records is None:
            records = list(produce())
            self.append(kind, records, phase, step, part=part)
        return records

    def find(self, kind: Kind, record: type[R], phase: str, step: int, *, part: int = 0) -> list[R] | None:
        """The completed records of one part of a step, or None."""
        batch = (phase, step, part)
        span = self._catalog(kind).get(batch)
        return None if span is None else self._load(kind, record, batch, span)

    def read(
        self, kind: Kind, record: type[R] = dict, *, problems: list[str] | None = None
    ) -> list[tuple[str, int, R]]:
        """All completed records as (phase, step, record), in order; of a batch that was written twice, the last one.

        Args:
            problems: receives a sentence for every unreadable batch, which is then left out; None raises.

        Raises:
            DamagedError: a batch is damaged, or of another version.
            RunError: the file cannot be read at all.
        """
        return list(self.scan(kind, record, problems=problems))

    def scan(
        self, kind: Kind, record: type[R] = dict, *, problems: list[str] | None = None
    ) -> Iterator[tuple[str, int, R]]:
        """Records as in `read`, loaded batch by batch, since a run may not fit into memory."""
        for batch, span in self._catalog(kind).items():
            try:
                records = self._load(kind, record, batch, span)
            except DamagedError as error:
                if problems is None:
                    raise
                problems.append(str(error).removeprefix(f"{self.path}/"))
            else:
                for item in records:
                    yield batch[0], batch[1], item

    def has(self, kind: Kind) -> bool:
        """True if a batch of this kind was completed, even an empty one."""
        return bool(self._catalog(kind))

    def batches(self, kind: Kind) -> list[BatchId]:
        """Ids of completed batches, in order; `find` reads one."""
        return list(self._catalog(kind))

    def append(self, kind: Kind, records: Iterable[Any], phase: str, step: int, *, part: int = 0) -> None:
        """Write a batch and its completion line.

        Raises:
            RunError: the disk is full or the folder is read-only. Earlier batches stay complete.
        """
        assert self._writer == "run" or (kind in OF_COLLECTOR) == (self._writer == "collector"), (
            f"{kind} is another process's"
        )
        batch = {"phase": phase, "step": step, "part": part}
        lines = [json.dumps({**batch, "record": to_json(record)}, ensure_ascii=False) for record in records]
        lines.append(json.dumps({**batch, "done": len(lines)}))
        path = self.path / f"{kind}.jsonl"
        with self._writing(), restored_on_error(path), path.open("a+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")  # ends an incomplete line of a killed process, which readers skip
            file.write(("\n".join(lines) + "\n").encode("utf-8", errors="surrogatepass"))
            file.flush()
            os.fsync(file.fileno())
        if kind == "metrics" and self.on_metrics is not None:
            self.on_metrics()

    def _catalog(self, kind: Kind) -> dict[BatchId, Span]:
        """Span of every completed batch. Reads only lines that are new since the last call, and does not parse
        records."""
        path = self.path / f"{kind}.jsonl"
        offset, catalog = self._seen.get(kind, (0, {}))
        if not path.exists():
            return catalog
        batch: list[int] = []  # offsets of its records
        with self._reading(kind) as file:
            file.seek(offset)
            for line in file:
                done = _completed(line)
                if done is None:
                    batch.append(offset)
                elif (count := done[1]) <= len(batch):
                    catalog.pop(done[0], None)
                    catalog[done[0]] = (batch[len(batch) - count] if count else offset, offset)
                offset += len(line)
                if done is not None:
                    batch = []
                    self._seen[kind] = (offset, catalog)
        return catalog

    def _load(self, kind: Kind, record: type[R], batch: BatchId, span: Span) -> list[R]:
        begin, end = span
        with self._reading(kind) as file:
            file.seek(begin)
            lines = file.read(end - begin).split(b"\n")[:-1]
        return [self._record(kind, record, batch, line) for line in lines]

    def _record(self, kind: Kind, record: type[R], batch: BatchId, line: bytes) -> R:
        try:
            return _parsed(line, record)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            position = "{} {} part {}".format(*batch)
            message = f"{type(error).__name__}: {error}"
            raise DamagedError(f"{self.path / kind}.jsonl, {position}: {message}") from error

    @contextmanager
    def _reading(self, kind: Kind) -> Iterator[BinaryIO]:
        path = self.path / f"{kind}.jsonl"
        try:
            with documents.open_file(path, RunError) as file:
                yield file
        except OSError as error:
            raise RunError(f"{path} cannot be read: {reason(error)}") from error

    # -- checkpoints and tasks -------------------------------------------------------------------------------------

    def save_checkpoint(self, name: str, fill: Callable[[Path], object]) -> Path:
        """Write a checkpoint folder, which is either complete or absent; `fill` writes the files into a temporary
        one."""
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
        """Copy a task set into the run, by hard links if possible, so that the run is self-contained."""
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
            advice = f"Complete results are kept: {way_out(error)}, then"
            has_recipe = os.path.exists(self.path / "recipe.toml")  # noqa: PTH110  # also False for a name that is too long
            remedy = (
                f"{advice} `{self.resuming}`" if has_recipe else f"The run was not started: {way_out(error)}"
            )
            raise RunError(f"cannot write to {self.path}: {reason(error)}. {remedy}.") from error


def _completed(line: bytes) -> tuple[BatchId, int] | None:
    """The id of the batch and the number of its records in a completion line; None for any other line."""
    done = DONE.fullmatch(line)
    try:
        return (json.loads(done["phase"]), int(done["step"]), int(done["part"])), int(done["count"])  # type: ignore
    except (TypeError, ValueError):
        return None


def _parsed(line: bytes, record: type[R]) -> R:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN and lone surrogates, which are rare
        value = json.loads(line.decode("utf-8", errors="surrogatepass"), parse_int=_integer)
    content = value.get("record") if isinstance(value, dict) else None
    if not isinstance(content, dict):
        raise ValueError(f"{line[:80].decode(errors='replace')!r} is no record")
    return cast("R", content) if record is dict else from_json(record, content)


def _integer(digits: str) -> int | float:
    """An integer as orjson reads it: a float beyond 64 bits."""
    return int(digits) if len(digits) < 20 else float(digits)
