"""What a run keeps on disk: enough to resume, to judge again and to report.

    runs/NAME/
        recipe.toml        the resolved recipe
        manifest.json      versions, hardware, git revision, seed
        tasks/SET/NAME/    the task folders in use (hard links where the file system allows)
        rollouts.jsonl  verdicts.jsonl  hints.jsonl  flags.jsonl  gate.jsonl  oracle.jsonl  metrics.jsonl
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson

from woodshed.records import RunError, from_json, to_json

Kind = Literal["rollouts", "verdicts", "hints", "flags", "gate", "oracle", "metrics", "lessons", "pieces"]

At = tuple[str, int, int]  # phase, step, part
Place = tuple[int, int]  # first byte of a batch's records, and the byte behind them
DONE = re.compile(
    rb'\{"phase": (?P<phase>"(?:[^"\\]|\\.)*"), "step": (?P<step>\d+), "part": (?P<part>\d+), '
    rb'"done": (?P<count>\d+)\}\n'
)

R = TypeVar("R")


class DamagedError(RunError, ValueError):
    """Records that cannot be read; also a ValueError, for readers that go on without them."""


class RunDir:
    """One run's folder. Open it with `create` or `open`; only one process may write to it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._seen: dict[Kind, tuple[int, dict[At, Place]]] = {}
        self.on_metrics: Callable[[], object] | None = None
        """Called whenever a metrics line was completed."""

    @classmethod
    def create(cls, path: Path, *, recipe: str, manifest: dict[str, Any]) -> RunDir:
        """A new run folder, locked for writing.

        Raises:
            RunError: the folder exists and holds a run, or cannot be written.
        """
        if (path / "recipe.toml").exists():
            raise RunError(
                f"{path} already holds a run. Go on with `woodshed train --resume {path}`, "
                "or choose another name with `name=OTHER`."
            )
        run = cls(path)
        with run._writing():
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / "manifest.json", json.dumps(manifest, indent=2) + "\n")
            write_atomically(path / "recipe.toml", recipe)
        run.lock()
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """A run folder for reading.

        Raises:
            RunError: there is no run at `path`; names the run that was meant, or the runs beside it.
        """
        if (path / "recipe.toml").is_file():
            return cls(path)
        if path.is_file():
            meant = f"; its run is {path.parent}" if (path.parent / "recipe.toml").is_file() else ""
            raise RunError(f"{path} is a file, and a run is a folder{meant}")
        why = ": the folder holds no recipe.toml" if path.is_dir() else ""
        beside = sorted(p.parent.name for p in path.parent.glob("*/recipe.toml"))
        known = f"; runs there: {', '.join(beside)}" if beside else ""
        raise RunError(f"no run at {path}{why}{known}")

    def lock(self) -> None:
        """Claim the folder for writing until this process ends.

        Raises:
            RunError: another process is writing to it.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 32).decode().strip() or "unknown"
            os.close(descriptor)
            raise RunError(
                f"{self.path} is being written by process {owner}; wait for it or stop it first"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor

    def unlock(self) -> None:
        """Let another process write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def manifest(self) -> dict[str, Any]:
        """What the run was made with; {} where the file was deleted.

        Raises:
            RunError: the file is damaged.
        """
        path = self.path / "manifest.json"
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(
                f"{path} cannot be read: {error}. Restore it, or delete it to go on without"
            ) from None
        return found if isinstance(found, dict) else {}

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest.

        Raises:
            RunError: it cannot be written.
        """
        with self._writing():
            write_atomically(self.path / "manifest.json", json.dumps(manifest, indent=2) + "\n")

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
        place = self._catalog(kind).get((phase, step, part))
        return None if place is None else self._load(kind, record, place)

    def read(
        self, kind: Kind, record: type[R] = dict, *, problems: list[str] | None = None
    ) -> list[tuple[str, int, R]]:
        """All completed records as (phase, step, record), in order; a batch written twice counts once, the last.

        Args:
            problems: receives a sentence for every batch that cannot be read, which is then left out; None raises.

        Raises:
            DamagedError: a batch is damaged, or of another version.
        """
        return list(self.scan(kind, record, problems=problems))

    def scan(
        self, kind: Kind, record: type[R] = dict, *, problems: list[str] | None = None
    ) -> Iterator[tuple[str, int, R]]:
        """What `read` gives, batch by batch: a run may hold more than memory does."""
        for (phase, step, part), place in self._catalog(kind).items():
            try:
                found = self._load(kind, record, place)
            except (ValueError, KeyError, TypeError) as error:
                problem = f"{kind}.jsonl, {phase} {step} part {part}: {type(error).__name__}: {error}"
                if problems is None:
                    raise DamagedError(f"{self.path / problem}") from error
                problems.append(f"{problem}; left out")
            else:
                for each in found:
                    yield phase, step, each

    def has(self, kind: Kind) -> bool:
        """Whether anything of this kind was completed, be it an empty batch."""
        return bool(self._catalog(kind))

    def batches(self, kind: Kind) -> list[At]:
        """Where completed records lie, as (phase, step, part), in order; `find` reads one."""
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
        with self._writing(), path.open("a+b") as file:
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
        """Where every completed batch lies. Only what was appended since the last look is read, and not parsed."""
        path = self.path / f"{kind}.jsonl"
        offset, found = self._seen.get(kind, (0, {}))
        if not path.exists():
            return found
        batch: list[int] = []  # where its records begin
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                done = DONE.fullmatch(line)
                if done is None:
                    batch.append(offset)
                elif (count := int(done["count"])) <= len(batch):
                    at = (json.loads(done["phase"]), int(done["step"]), int(done["part"]))
                    found.pop(at, None)
                    found[at] = (batch[len(batch) - count] if count else offset, offset)
                offset += len(line)
                if done is not None:
                    batch = []
                    self._seen[kind] = (offset, found)
        return found

    def _load(self, kind: Kind, record: type[R], place: Place) -> list[R]:
        begin, end = place
        with (self.path / f"{kind}.jsonl").open("rb") as file:
            file.seek(begin)
            lines = file.read(end - begin).split(b"\n")[:-1]
        return [_record(line, record) for line in lines]

    # -- checkpoints and tasks -------------------------------------------------------------------------------------

    def save_checkpoint(self, name: str, fill: Callable[[Path], object]) -> Path:
        """A checkpoint folder that is either complete or absent; `fill` writes the files into a temporary one."""
        target = self.path / "checkpoints" / name
        partial = target.with_name(f".{name}.partial")
        with self._writing():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            fill(partial)
            for file in partial.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        return target

    def checkpoints(self, prefix: str) -> list[Path]:
        """Complete checkpoints whose name starts with `prefix`, oldest first."""
        return sorted((self.path / "checkpoints").glob(f"{prefix}*"))

    def keep_tasks(self, name: str, folders: Iterable[Path]) -> Path:
        """The run's own copy of a task set, by hard link where possible, so that the run stands alone."""
        target = self.path / "tasks" / name
        if target.exists():
            return target
        partial = target.with_name(f".{name}.partial")
        with self._writing():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for folder in folders:
                shutil.copytree(folder, partial / folder.name, copy_function=_link_or_copy, symlinks=True)
            partial.rename(target)
        return target

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path}: {error.strerror or error}. "
                f"Nothing that was complete is lost: make room, then `woodshed train --resume {self.path}`."
            ) from error


def _record(line: bytes, record: type[R]) -> R:
    try:
        found = orjson.loads(line)["record"]
    except orjson.JSONDecodeError:  # NaN and lone surrogates, which stand in few lines
        found = json.loads(line.decode("utf-8", errors="surrogatepass"), parse_int=_integer)["record"]
    return found if record is dict else from_json(record, found)


def _integer(digits: str) -> int | float:
    """What orjson makes of an integer: beyond 64 bits a float."""
    return int(digits) if len(digits) < 20 else float(digits)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content; readers see the old or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
