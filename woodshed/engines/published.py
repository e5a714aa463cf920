"""The policy's weights as files: the folders that a trainer publishes, and a receiver's copy that follows them.

    weights/v000012/   a Hugging Face folder, a PEFT adapter, or the difference to the version before
        published.json    what it is: a digest of every tensor's result, and the trainer's log-probs of a fixed prompt
    weights/LATEST     name of the newest folder, replaced last

A difference is the XOR of a tensor's bytes with those of the version before, compressed: a small step changes few
bfloat16 numbers. XOR undoes itself, so a difference that is applied twice would give the old weights back. Therefore
every result is compared with its digest, and what fails is taken back before a server hears of it. Nothing here imports
PyTorch: receivers work where there is none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Condition
from typing import Any, Literal, TypeVar

import numpy as np

from woodshed import documents
from woodshed.records import SamplerError, from_json, to_json
from woodshed.runs import machine
from woodshed.runs.files import reason, remove, sweep, write_atomically

RECORD, LATEST = "published.json", "LATEST"
FULL_EVERY = 20
"""Versions from one whole publication to the next, from which a receiver that joins late begins."""
KEPT = 2
"""Newest versions that stay beside the whole publications that they follow from."""
LEVEL = 1
"""Of zstd: higher ones take longer and save little on differences."""
SHARED_MEMORY = Path("/dev/shm")
WAY_OUT = "it is damaged or of another run; the next whole publication replaces it"

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
T = TypeVar("T")


@dataclass(frozen=True)
class PublishedTensor:
    """One tensor of a version."""

    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it: "BF16"."""
    digest: str
    """BLAKE2b-128 of the bytes that the tensor has in this version."""
    file: str
    """File in the folder that holds it, or its difference."""
    begin: int = 0
    """First byte of the compressed difference in the file."""
    size: int = 0
    """Bytes of the compressed difference; 0 where the tensor is as in the version before."""


@dataclass(frozen=True)
class Canary:
    """A fixed prompt and the trainer's log-probs of all its tokens but the first, in nats."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]


@dataclass(frozen=True)
class Published:
    """One version of the weights."""

    version: int
    kind: Literal["full", "delta", "adapter"]
    tensors: dict[str, PublishedTensor]
    canary: Canary | None = None
    base: str = ""
    """Folder, beside this one, of the version that a difference is to."""
    base_fingerprint: str = ""
    size_bytes: int = 0
    """Of the files with weights."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all tensors of the result, the same for a whole publication and a difference that lead to it."""
        lines = (f"{name} {tensor.digest}" for name, tensor in sorted(self.tensors.items()))
        return digest_of("\n".join(lines).encode())


def name_of(version: int) -> str:
    """Folder of a version."""
    return f"v{version:06d}"


def digest_of(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read(folder: Path) -> Published:
    """Read a version's record.

    Raises:
        SamplerError: it is missing or damaged.
    """
    try:
        return from_json(Published, documents.read_json(folder / RECORD, SamplerError, WAY_OUT))
    except (OSError, ValueError) as error:
        raise SamplerError(f"{folder} cannot be read ({error}): {WAY_OUT}") from None


def latest(root: Path) -> Path | None:
    """Folder of the newest version; None before the first."""
    try:
        return root / (root / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def finish(folder: Path, published: Published) -> None:
    """Write the record of a folder that is complete otherwise, and see it on the disk."""
    (folder / RECORD).write_text(json.dumps(to_json(published)) + "\n", encoding="utf-8")
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def announce(folder: Path, kept: int = KEPT) -> None:
    """Name a folder as the newest, and remove those that no receiver needs any more.

    The newest ones stay, with the whole publication that they follow from, for receivers that join late or are behind.
    """
    root = folder.parent
    write_atomically(root / LATEST, f"{folder.name}\n")
    versions = sorted(path for path in root.glob("v[0-9]*") if path.name <= folder.name)
    needed = {each for newest in versions[-kept:] for each in _chain(newest)}
    for old in set(versions) - needed:
        shutil.rmtree(old)


def _chain(folder: Path) -> list[Path]:
    """The folders from the last whole publication to this one.

    Raises:
        SamplerError: one is missing or damaged.
    """
    chain = [folder]
    while base := read(chain[-1]).base:
        chain.append(folder.with_name(base))
    return chain[::-1]


# --- writing --------------------------------------------------------------------------------------------------------


class DeltaWriter:
    """File of compressed differences that one rank writes."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self.path = path
        self._file = path.open("wb")
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)

    def add(self, old: Bytes, new: Bytes, shape: Iterable[int], dtype: str) -> PublishedTensor:
        """Write the difference of a tensor's bytes."""
        difference = np.bitwise_xor(old, new)
        begin, size = self._file.tell(), 0
        if difference.any():
            size = self._file.write(self._compressor.compress(difference.tobytes()))
        return PublishedTensor(tuple(shape), dtype, digest_of(new), self.path.name, begin, size)

    def close(self) -> None:
        self._file.close()


# --- receiving ------------------------------------------------------------------------------------------------------


class Receiver:
    """A copy of the newest whole weights, for servers that load a folder; it follows what a trainer publishes.

    Args:
        in_memory: keep the copy in shared memory, where the servers are on this machine; else beside what is published.
    """

    def __init__(self, *, in_memory: bool) -> None:
        self._in_memory = in_memory
        self._changed = Condition()
        self._readers = 0
        """Servers that load the copy at this moment."""
        self._held: Published | None = None
        self._folder = Path()
        """Folder of the weights at hand: as published, or the copy that differences were applied to."""
        self._mirror: Path | None = None
        self._lock = -1
        """Descriptor that says that somebody uses the copy."""
        self._tensors: dict[str, Bytes] = {}
        """Bytes of the copy, which are those of its files."""

    @contextmanager
    def received(self, folder: Path) -> Iterator[tuple[Path, Published]]:
        """Check a version, and give the folder from which servers can load it, unchanged while this is open.

        Versions between the copy and a difference are applied first, from the last whole publication where the copy is
        older than that. A damaged version leaves the copy at one that is whole.

        Raises:
            SamplerError: the version, or one that it builds on, is missing, damaged, or older than the copy.
        """
        published = read(folder)
        if published.kind == "adapter":
            check(folder, published)
            yield folder, published
            return
        with self._changed:
            is_here = self._mirror is not None or folder == self._folder
            if self._held is None or published.fingerprint != self._held.fingerprint or not is_here:
                self._changed.wait_for(lambda: not self._readers)
                self._follow(folder, published)
            self._held = published
        with self.held() as found:
            yield found

    @contextmanager
    def held(self) -> Iterator[tuple[Path, Published]]:
        """The weights that were received last, unchanged while this is open."""
        with self._changed:
            assert self._held is not None, "nothing was received"
            found = self._folder, self._held
            self._readers += 1
        try:
            yield found
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Remove the copy."""
        self._tensors, self._held = {}, None
        if self._mirror is not None:
            remove(self._mirror)
            os.close(self._lock)
            self._mirror = None

    def _follow(self, folder: Path, published: Published) -> None:
        if published.kind == "full":
            check(folder, published)
            self.close()
            self._held, self._folder = published, folder
            return
        held = self._held
        if held is not None and published.version <= held.version:
            raise SamplerError(
                f"{folder} is version {published.version}, and version {held.version} was received: "
                "differences are applied once, in their order"
            )
        chain = [(each, read(each)) for each in _chain(folder)]
        known = [i for i, (_, each) in enumerate(chain) if held and each.fingerprint == held.fingerprint]
        if not known:  # behind the last whole publication, or new
            self._follow(*chain[0])
        for each in chain[(known[-1] if known else 0) + 1 :]:
            self.apply(*each)

    def apply(self, folder: Path, published: Published) -> None:
        """Apply one difference to the copy.

        Raises:
            SamplerError: it is of another base, or damaged; the copy is as before.
        """
        held = self._held
        if held is None or published.base_fingerprint != held.fingerprint:
            at = f"version {held.version}" if held else "nothing"
            raise SamplerError(f"{folder} is a difference to {published.base}, and the copy here is {at}")
        if set(published.tensors) != set(held.tensors):
            raise SamplerError(f"{folder} has other tensors than the version before: {WAY_OUT}")
        if self._mirror is None:
            self._copy()
        changed = [name for name, tensor in published.tensors.items() if tensor.size]
        for name in published.tensors.keys() - set(changed):
            if published.tensors[name].digest != held.tensors[name].digest:
                raise SamplerError(f"{folder}: tensor {name!r} changes without a difference: {WAY_OUT}")
        applied: list[str] = []

        def change(name: str) -> None:
            tensor, data = published.tensors[name], self._tensors[name]
            _exchange(folder, name, tensor, data)
            applied.append(name)
            if digest_of(data) != tensor.digest:
                raise SamplerError(f"{folder}: tensor {name!r} is not what was published: {WAY_OUT}")

        try:
            _each(change, changed)
        except BaseException:
            for name in applied:  # XOR undoes itself
                _exchange(folder, name, published.tensors[name], self._tensors[name])
            raise
        self._held = published

    def _copy(self) -> None:
        """Copy the whole weights at hand, in memory where they fit."""
        size = sum(path.stat().st_size for path in self._folder.iterdir())
        fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.2 * size
        place = SHARED_MEMORY / f"woodshed-{os.getuid()}" if self._in_memory and fits else self._folder.parent
        place.mkdir(mode=0o700, exist_ok=True)
        sweep(place)  # of receivers that were killed
        mirror = Path(tempfile.mkdtemp(prefix=".mirror.", suffix=".partial", dir=place))
        self._lock = os.open(mirror, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            shutil.copytree(self._folder, mirror, dirs_exist_ok=True)
        except OSError as error:
            remove(mirror)
            os.close(self._lock)
            raise SamplerError(f"{self._folder} cannot be copied to {place}: {reason(error)}") from None
        self._mirror = self._folder = mirror
        self._tensors = dict(tensors_of(mirror, "r+"))


def _exchange(folder: Path, name: str, tensor: PublishedTensor, data: Bytes) -> None:
    """Turn the bytes of the version before into this one's, or back, in place."""
    import zstandard

    try:
        with (folder / tensor.file).open("rb") as file:
            file.seek(tensor.begin)
            packed = file.read(tensor.size)
        difference = zstandard.ZstdDecompressor().decompress(packed, max_output_size=len(data))
    except (OSError, zstandard.ZstdError) as error:
        raise SamplerError(f"{folder}: tensor {name!r} cannot be read ({error}): {WAY_OUT}") from None
    if len(difference) != len(data):
        raise SamplerError(f"{folder}: tensor {name!r} is of another size: {WAY_OUT}")
    np.bitwise_xor(data, np.frombuffer(difference, np.uint8), out=data)


def check(folder: Path, published: Published) -> None:
    """Compare whole weights or an adapter with the digests of their record.

    Raises:
        SamplerError: a tensor is missing or differs.
    """
    try:
        tensors = dict(tensors_of(folder))
    except (OSError, ValueError, KeyError) as error:
        raise SamplerError(f"{folder} cannot be read ({error}): {WAY_OUT}") from None
    if odd := sorted(set(tensors) ^ set(published.tensors)):
        raise SamplerError(f"{folder}: tensor {odd[0]!r} is on one side only: {WAY_OUT}")

    def compare(name: str) -> None:
        if digest_of(tensors[name]) != published.tensors[name].digest:
            raise SamplerError(f"{folder}: tensor {name!r} is not what was published: {WAY_OUT}")

    _each(compare, list(tensors))


def tensors_of(folder: Path, mode: Literal["r", "r+"] = "r") -> Iterator[tuple[str, Bytes]]:
    """Name and bytes of every tensor in the safetensors files of a folder; "r+" writes changes into the files."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, (_, data) in tensors_in(file, mode).items():
            yield name, data


def tensors_in(file: Path, mode: Literal["r", "r+"] = "r") -> dict[str, tuple[dict[str, Any], Bytes]]:
    """Entry of the header (dtype, shape) and bytes of every tensor in a safetensors file.

    Raises:
        ValueError, OSError: it is damaged, or cannot be read.
    """
    data = np.memmap(file, np.uint8, mode)
    first = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:first].tobytes())
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if first + end > len(data):
            raise ValueError(f"{file.name} is cut off")
        found[name] = entry, data[first + begin : first + end]
    return found


def _each(act: Callable[[T], object], items: list[T]) -> None:
    """Call a function for each item, on all cores: digests hold no lock."""
    with ThreadPoolExecutor(machine.cores()) as pool:
        for _ in pool.map(act, items):
            pass
