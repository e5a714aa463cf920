"""Contents of files of any form: texts, names and bytecode from archives, databases, caches and repositories.

Standard library only; runs inside a sandbox, because files of a hostile repository are opened here. Nothing is ever
executed or unpickled. Sources of the formats: Git's pack format document, PEP 552 (.pyc), PEP 427 (wheels).
"""

from __future__ import annotations

import base64
import binascii
import bz2
import gzip
import hashlib
import html
import importlib.util
import io
import lzma
import marshal
import pickletools
import re
import shutil
import subprocess
import tarfile
import tempfile
import types
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from woodshed.pysource import syntax

MAX_BYTES = 64 << 20
"""Of one file, packed or unpacked; more is not read."""
MAX_DEPTH = 6
"""Of archives inside of archives."""
PRINTABLE = re.compile(rb"[\x20-\x7e\t\n\r]{3,}")
BASE64 = re.compile(r"[A-Za-z0-9+/]{40,}(?:\s[A-Za-z0-9+/]{20,})*={0,2}")
ZLIB = re.compile(rb"\x78[\x01\x5e\x9c\xda]")
HEX = re.compile(r"(?:[0-9a-fA-F]{2}){24,}")
LZMA_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError)


@dataclass(frozen=True)
class Content:
    """Something that was read."""

    where: str
    """Path of the file, then " > " and the path inside of it."""
    text: str = ""
    is_binary: bool = False
    """The text is strings of a binary file, one a line: names may be there without their order."""
    code: types.CodeType | None = None
    problem: str = ""
    """Why something in a known form could not be opened."""


def read(path: str, data: bytes, depth: int = 0) -> Iterator[Content]:
    """Every piece of a file."""
    data = data[:MAX_BYTES]
    if depth > MAX_DEPTH:
        yield Content(path, problem=f"more than {MAX_DEPTH} archives inside of each other")
        return
    for magic, reader in FORMATS:
        if data.startswith(magic) or (magic == TAR and data[257:262] == b"ustar"):
            yield from reader(path, data, depth)
            return
    if data[2:4] == b"\r\n" and 0 in data[4:16]:
        yield from _pyc(path, data)
    elif data[:1] == b"\x78" and (inner := _zlib(data)):
        is_object = re.match(rb"(blob|commit|tag|tree) \d+\0", inner)
        yield from read(f"{path} > zlib", inner[is_object.end() if is_object else 0 :], depth + 1)
    elif (text := decode(data)) is not None:
        as_python = [syntax.legible(data)] if syntax.declared(data) != "utf-8" else []
        for variant in chain.from_iterable(map(variants, dict.fromkeys([text, *as_python]))):
            yield Content(path, variant)
        for name, inner in _encoded(text):
            yield from read(f"{path} > {name}", inner, depth + 1)
    else:
        yield _strings(path, data)
        for inner in _carved(data):
            yield from read(f"{path} > zlib", inner, depth + 1)


def is_packed(data: bytes) -> bool:
    """True if a file must be unpacked to see its texts."""
    return any(data.startswith(magic) for magic, _ in FORMATS) or data[257:262] == b"ustar"


# ---- text -------------------------------------------------------------------------------------------------


def decode(data: bytes) -> str | None:
    """Text in UTF-8, UTF-16, UTF-32 or Latin-1; None for binary data."""
    for mark, codec in ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32")):
        if data.startswith(mark):
            return data.decode(codec, errors="replace")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    head = data[:4096]
    if head.count(0) > len(head) // 3:  # UTF-16 without a mark
        codec = "utf-16-le" if head[1::2].count(0) > head[::2].count(0) else "utf-16-be"
        try:
            return text if (text := data.decode(codec)).isprintable() or "\n" in text else None
        except UnicodeDecodeError:
            return None
    if 0 in head:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        control = sum(byte < 9 or 13 < byte < 32 for byte in head)
        return data.decode("latin-1") if control < len(head) / 50 else None


def variants(text: str) -> Iterator[str]:
    """The text, and how it reads without the wrapping that tools put around code."""
    yield text
    if "\\n" in text:
        joined = re.sub(r'\\n"\s*,\s*"', r"\\n", text)  # lines of a notebook
        joined = re.sub(r"\\u([0-9a-fA-F]{4})", lambda m: chr(int(m[1], 16)), joined)
        yield joined.replace("\\n", "\n").replace('\\"', '"').replace("\\t", "\t").replace("\\\\", "\\")
    if re.search(r"</\w+>|&(lt|gt|quot|#\d+);", text):
        yield html.unescape(re.sub(r"<[^<>]*>", "", text))
    if len(re.findall(r"(?m)^[+\-|>#;%*]", text)) > 2:
        yield re.sub(r"(?m)^([+\-|>#;%*]+ ?|\.\.\. )", "", text)
    if re.search(r"(?m)^\s*\d+[:|\t ]", text):
        yield re.sub(r"(?m)^\s*\d+\s*[:|\t ]", "", text)
    if "=20" in text or "=3D" in text:
        yield re.sub(r"=([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), text.replace("=\n", ""))
    if "%20" in text or "%0A" in text:
        yield re.sub(r"%([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), text)


def _encoded(text: str) -> Iterator[tuple[str, bytes]]:
    """Long runs of base64 and hexadecimal digits."""
    for match in BASE64.finditer(text):
        digits = re.sub(r"\s", "", match[0]).rstrip("=")
        try:
            yield "base64", base64.b64decode(digits + "=" * (-len(digits) % 4))
        except binascii.Error:
            continue
    for match in HEX.finditer(text):
        yield "hex", bytes.fromhex(match[0])


def _strings(path: str, data: bytes) -> Content:
    """Printable runs of binary data, like `strings`; those in UTF-16 as well."""
    runs = PRINTABLE.findall(data)
    wide = [run.replace(b"\0", b"") for run in re.findall(rb"(?:[\x20-\x7e]\0){6,}", data)]
    return Content(path, b"\n".join([*runs, *wide]).decode("ascii"), is_binary=True)


# ---- compressed and packed --------------------------------------------------------------------------------


def _zlib(data: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, MAX_BYTES)
    except zlib.error:
        return b""


def _carved(data: bytes) -> Iterator[bytes]:
    """Compressed streams inside of a binary file whose format is not known here, such as a Mercurial store."""
    for match in islice(ZLIB.finditer(data), 5000):
        inner = _zlib(data[match.start() :])
        if len(inner) > 64:
            yield inner


def _unpacker(
    name: str, opened: Callable[[io.BytesIO], io.BufferedIOBase]
) -> Callable[..., Iterator[Content]]:
    def unpack(path: str, data: bytes, depth: int) -> Iterator[Content]:
        try:
            with opened(io.BytesIO(data)) as stream:
                inner = stream.read(MAX_BYTES)
        except LZMA_ERRORS as error:
            yield _strings(path, data)
            yield Content(path, problem=f"damaged {name} ({error})")
            return
        yield from read(f"{path} > {name}", inner, depth + 1)

    return unpack


def _zstd(path: str, data: bytes, depth: int) -> Iterator[Content]:
    """Decompressed data, by the standard library from Python 3.14 on, else by the program."""
    try:
        zstd = importlib.import_module("compression.zstd")
        inner = zstd.decompress(data)
    except ImportError:
        if (program := shutil.which("zstd")) is None:
            yield Content(path, problem="no reader for zstd here")
            return
        done = subprocess.run([program, "-dcq"], input=data, capture_output=True, check=False, timeout=60)
        inner = done.stdout
        if done.returncode:
            yield Content(path, problem="damaged zstd")
    yield from read(f"{path} > zstd", inner[:MAX_BYTES], depth + 1)


def _zip(path: str, data: bytes, depth: int) -> Iterator[Content]:
    """Also wheels, eggs, jars and notebooks' friends: all are zip files."""
    remaining = MAX_BYTES
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            yield Content(path, "\n".join(archive.namelist()))
            for entry in archive.infolist():
                if entry.is_dir() or remaining <= 0:
                    continue
                with archive.open(entry) as stream:
                    inner = stream.read(remaining)
                remaining -= len(inner)
                yield from read(f"{path} > {entry.filename}", inner, depth + 1)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, *LZMA_ERRORS) as error:
        yield _strings(path, data)
        yield Content(path, problem=f"damaged or locked zip ({error})")


def _tar(path: str, data: bytes, depth: int) -> Iterator[Content]:
    remaining = MAX_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is None or remaining <= 0:
                    continue
                inner = stream.read(remaining)
                remaining -= len(inner)
                yield from read(f"{path} > {member.name}", inner, depth + 1)
    except (tarfile.TarError, *LZMA_ERRORS) as error:
        yield Content(path, problem=f"damaged tar ({error})")


# ---- Python -----------------------------------------------------------------------------------------------


def _pyc(path: str, data: bytes) -> Iterator[Content]:
    """Bytecode of this Python as code; of another one as strings."""
    yield _strings(path, data)
    if data[:4] == importlib.util.MAGIC_NUMBER:
        try:
            code = marshal.loads(data[16:])
        except (ValueError, EOFError, TypeError):
            return
        if isinstance(code, types.CodeType):
            yield Content(path, code=code)


def _pickle(path: str, data: bytes, depth: int) -> Iterator[Content]:
    """Strings of a pickle's opcodes; bytes in it are read on. Nothing is built."""
    strings: list[str] = []
    inner: list[bytes] = []
    try:
        for _, argument, _ in pickletools.genops(data):
            if isinstance(argument, str):
                strings.append(argument)
            elif isinstance(argument, bytes | bytearray) and len(argument) > 16:
                inner.append(bytes(argument))
    except (ValueError, EOFError, IndexError, UnicodeDecodeError):
        yield _strings(path, data)
    for text in strings:
        if len(text) > 40:
            for variant in variants(text):
                yield Content(f"{path} > pickle", variant)
    yield Content(f"{path} > pickle", "\n".join(strings), is_binary=True)
    for each in inner:
        yield from read(f"{path} > pickle", each, depth + 1)


# ---- databases --------------------------------------------------------------------------------------------


def _sqlite(path: str, data: bytes, depth: int) -> Iterator[Content]:
    """Every value of every table; then the raw file, because deleted rows stay in it."""
    yield _strings(path, data)
    try:
        import sqlite3
    except ImportError:
        return
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "db")
        copy.write_bytes(data)
        try:
            base = sqlite3.connect(f"file:{copy}?mode=ro&immutable=1", uri=True)
            base.text_factory = bytes
            tables = [
                row[0].decode() for row in base.execute("SELECT name FROM sqlite_master WHERE type='table'")
            ]
            for table in tables:
                for row in base.execute(f'SELECT * FROM "{table}"'):
                    for value in (v for v in row if isinstance(v, bytes) and len(v) > 8):
                        yield from read(f"{path} > {table}", value, depth + 1)
        except sqlite3.DatabaseError:
            return


def _inventory(path: str, data: bytes, depth: int) -> Iterator[Content]:
    """objects.inv: four lines of text, then zlib."""
    yield Content(path, _zlib(data.split(b"\n", 4)[4]).decode("utf-8", errors="replace"))


# ---- git --------------------------------------------------------------------------------------------------

KINDS = {1: "commit", 2: "tree", 3: "blob", 4: "tag"}


def _bundle(path: str, data: bytes, depth: int) -> Iterator[Content]:
    start = data.find(b"PACK")
    yield from _pack(path, data[start:], depth)


def _pack(path: str, data: bytes, depth: int) -> Iterator[Content]:
    """Every blob, commit and tag of a pack, whether anything refers to it or not."""
    objects: dict[int, tuple[int, bytes]] = {}
    hashed: dict[bytes, int] = {}
    waiting: list[tuple[int, bytes | int, bytes]] = []
    try:
        for begin, kind, base, body in _entries(data):
            if kind in KINDS:
                _remember(objects, hashed, begin, kind, body)
            else:
                waiting.append((begin, base, body))
        while waiting:
            known = [w for w in waiting if (w[1] in objects if isinstance(w[1], int) else w[1] in hashed)]
            if not known:
                break
            for begin, base, delta in known:
                kind, source = objects[base if isinstance(base, int) else hashed[base]]
                _remember(objects, hashed, begin, kind, _patched(source, delta))
            done = {begin for begin, _, _ in known}
            waiting = [w for w in waiting if w[0] not in done]
    except (zlib.error, IndexError):
        yield Content(path, problem="damaged pack")
    for begin, (kind, body) in objects.items():
        if kind != 2:
            yield from read(f"{path} > {KINDS[kind]} at {begin}", body, depth + 1)


def _entries(data: bytes) -> Iterator[tuple[int, int, bytes | int, bytes]]:
    """Offset, kind, base (offset or hash, of a delta) and unpacked body of every entry."""
    offset = 12
    for _ in range(int.from_bytes(data[8:12], "big")):
        begin = offset
        kind, offset = _entry_head(data, offset)
        base: bytes | int = b""
        if kind == 6:
            base, offset = _offset(data, offset)
            base = begin - base
        elif kind == 7:
            base, offset = data[offset : offset + 20], offset + 20
        unpack = zlib.decompressobj()
        body = unpack.decompress(data[offset:], MAX_BYTES)
        offset = len(data) - len(unpack.unused_data)
        yield begin, kind, base, body


def _remember(
    objects: dict[int, tuple[int, bytes]], hashed: dict[bytes, int], begin: int, kind: int, body: bytes
) -> None:
    objects[begin] = kind, body
    head = f"{KINDS[kind]} {len(body)}\0".encode()
    hashed[hashlib.sha1(head + body, usedforsecurity=False).digest()] = begin


def _entry_head(data: bytes, offset: int) -> tuple[int, int]:
    kind = (data[offset] >> 4) & 7
    while data[offset] & 0x80:
        offset += 1
    return kind, offset + 1


def _offset(data: bytes, offset: int) -> tuple[int, int]:
    value = data[offset] & 0x7F
    while data[offset] & 0x80:
        offset += 1
        value = ((value + 1) << 7) | (data[offset] & 0x7F)
    return value, offset + 1


def _patched(source: bytes, delta: bytes) -> bytes:
    """The object that a delta makes of another: sizes, then copies and insertions."""
    position = 0
    for _ in range(2):
        while delta[position] & 0x80:
            position += 1
        position += 1
    out = bytearray()
    while position < len(delta):
        op, position = delta[position], position + 1
        if op & 0x80:
            begin = size = 0
            for bit in range(4):
                if op & (1 << bit):
                    begin, position = begin | delta[position] << (8 * bit), position + 1
            for bit in range(3):
                if op & (0x10 << bit):
                    size, position = size | delta[position] << (8 * bit), position + 1
            out += source[begin : begin + (size or 0x10000)]
        else:
            out += delta[position : position + op]
            position += op
    return bytes(out)


TAR = b"\0ustar"
FORMATS: tuple[tuple[bytes | tuple[bytes, ...], Callable[..., Iterator[Content]]], ...] = (
    ((b"PK\x03\x04", b"PK\x05\x06"), _zip),
    (b"\x1f\x8b", _unpacker("gzip", lambda raw: gzip.GzipFile(fileobj=raw))),
    (b"BZh", _unpacker("bzip2", bz2.BZ2File)),
    ((b"\xfd7zXZ\0", b"\x5d\0\0"), _unpacker("xz", lzma.LZMAFile)),
    (b"\x28\xb5\x2f\xfd", _zstd),
    (b"SQLite format 3\0", _sqlite),
    (b"PACK", _pack),
    ((b"# v2 git bundle", b"# v3 git bundle"), _bundle),
    (b"\x80", _pickle),
    (b"# Sphinx inventory version 2", _inventory),
    (TAR, _tar),
)
"""First bytes of a file type, and its reader. The mark of a tar archive is at byte 257."""
