"""A small removal task, and every way in which its answer could still lie around, one per kind of place."""

from __future__ import annotations

import base64
import bz2
import gzip
import html
import importlib.util
import io
import json
import lzma
import marshal
import pickle
import re
import sqlite3
import subprocess
import tarfile
import zipfile
import zlib
from pathlib import Path

from conftest import tiny_environment

from woodshed.records import Environment, Task
from woodshed.tasks import folder

HEAD = '''\
"""Streams woven into one."""


def chunks(stream, size):
    """Lists of `size` items."""
    found = []
    for item in stream:
        found.append(item)
        if len(found) == size:
            yield found
            found = []
    if found:
        yield found
'''
FUNCTION = '''\
def interleave(streams, width, padding=None):
    """Items of all streams in turn, `width` at a time; short streams are padded."""
    iterators = [iter(stream) for stream in streams]
    exhausted = set()
    while len(exhausted) < len(iterators):
        row = []
        for position, iterator in enumerate(iterators):
            taken = [item for _, item in zip(range(width), iterator)]
            if len(taken) < width:
                exhausted.add(position)
            row.extend(taken + [padding] * (width - len(taken)))
        if len(exhausted) < len(iterators) or any(item is not padding for item in row):
            yield tuple(row)
'''
CORE = f"{HEAD}\n\n{FUNCTION}"
NAMES = {
    **{
        "interleave": "weft",
        "streams": "sources",
        "iterators": "threads",
        "exhausted": "empty",
        "row": "line",
    },
    **{"taken": "got", "position": "n", "iterator": "thread", "item": "x"},
}
RENAMED = re.sub(r"\w+", lambda word: NAMES.get(word[0], word[0]), FUNCTION)
VISIBLE = "from weave.core import chunks\n\n\ndef test_chunks():\n    assert list(chunks('abc', 2)) == [['a', 'b'], ['c']]\n"
HIDDEN = (
    VISIBLE.replace("import chunks", "import chunks, interleave")
    + """

def test_interleave_of_equal_streams_takes_width_items_of_each():
    woven = list(interleave(["abcd", "wxyz"], 2))
    assert woven == [("a", "b", "w", "x"), ("c", "d", "y", "z")]


def test_interleave_pads_what_is_short():
    woven = list(interleave(["abc", "x"], 2, padding="-"))
    assert woven == [("a", "b", "x", "-"), ("c", "-", "-", "-")]
"""
)


def environment() -> Environment:
    tiny = tiny_environment()
    return Environment(tiny.python, tiny.requirements, ("weave",), distribution="weave==1.0")


def removal_task(root: Path, *, visible_code: str = HEAD, code: str = CORE, level: int = 2) -> Task:
    """`interleave` is gone, its tests are hidden, and the instruction does not state its parameters."""
    workspace = root / "workspace"
    files = {"weave/__init__.py": "", "weave/core.py": visible_code, "tests/test_core.py": VISIBLE}
    files["README.md"] = "Use `chunks`, or `interleave` for several streams.\n"
    for path, text in files.items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_text(text, encoding="utf-8")
    task = Task(
        id="",
        name="weave-remove-interleave",
        folder=root,
        instruction="Weaving is gone: bring `interleave` back to weave/core.py.\n",
        environment=environment(),
        allowed_paths=("weave",),
        fail_to_pass=(
            "tests/test_core.py::test_interleave_of_equal_streams_takes_width_items_of_each",
            "tests/test_core.py::test_interleave_pads_what_is_short",
        ),
        pass_to_pass=("tests/test_core.py::test_chunks",),
        operator="remove",
        level=level,
        target_path="weave/core.py",
        target_symbol="interleave",
        target_lines=(15, 15),
        test_command="python -m pytest -q tests",
        verify_timeout_s=60.0,
        provenance={"source": "weave", "licence": "MIT"},
    )
    hidden = {"tests/test_core.py": HIDDEN.encode()}
    return folder.write(
        task,
        root / "set" / task.name,
        workspace=workspace,
        tests=hidden,
        gold={"weave/core.py": code.encode()},
    )


# -- every kind of place -------------------------------------------------------------------------------------------


def pyc(source: str = CORE, magic: bytes = importlib.util.MAGIC_NUMBER) -> bytes:
    return magic + bytes(12) + marshal.dumps(compile(source, "core.py", "exec", dont_inherit=True))


def zipped(name: str = "weave/core.py") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, CORE)
    return out.getvalue()


def tarred(mode: str = "w:gz", data: bytes = CORE.encode()) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        info = tarfile.TarInfo("weave-1.0/weave/core.py")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def sqlite(root: Path, statement: str, *rows: tuple[object, ...]) -> bytes:
    path = root / "made.db"
    path.unlink(missing_ok=True)
    base = sqlite3.connect(path)
    base.execute(f"CREATE TABLE t ({statement})")
    base.executemany(f"INSERT INTO t VALUES ({', '.join('?' * len(rows[0]))})", rows)
    base.commit()
    base.close()
    return path.read_bytes()


def git_files(root: Path) -> dict[str, bytes]:
    """A loose object, a pack whose blob is a delta that nothing refers to, and a bundle."""
    place = root / "git"
    place.mkdir()

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, "-C", str(place), *arguments], check=True, capture_output=True)

    git("init", "-q")
    (place / "core.py").write_text(CORE)
    git("add", ".")
    git("commit", "-qm", "one")
    loose = max((p for p in (place / ".git/objects").glob("??/*")), key=lambda p: p.stat().st_size)
    found = {"/workspace/.git/objects/aa/" + "b" * 38: loose.read_bytes()}
    git("bundle", "create", "all.bundle", "--all")
    found["/workspace/old.bundle"] = (place / "all.bundle").read_bytes()
    (place / "core.py").write_text(CORE + "# more\n" * 40)
    git("commit", "-qam", "two")
    git("repack", "-adfq", "--depth=5", "--window=5")
    (pack,) = (place / ".git/objects/pack").glob("*.pack")
    found["/workspace/lib/.git/objects/pack/pack-1.pack"] = pack.read_bytes()
    return found


def notebook() -> bytes:
    return json.dumps(
        {"cells": [{"cell_type": "code", "source": FUNCTION.splitlines(keepends=True)}]}
    ).encode()


def highlighted() -> bytes:
    """As Pygments and Sphinx write source."""
    lines = []
    for line in FUNCTION.splitlines():
        tokens = re.findall(r"\w+|\s+|[^\w\s]", line)
        lines.append("".join(f'<span class="n">{html.escape(t)}</span>' if t.strip() else t for t in tokens))
    return ("<pre>" + "\n".join(lines) + "</pre>").encode()


def planted(root: Path) -> dict[str, dict[str, bytes]]:
    """Kind of place to the files that are put there, by absolute path in the sandbox."""
    core, w = CORE.encode(), "/workspace"
    hidden_ids = "tests/test_core.py::test_interleave_pads_what_is_short"
    elf = b"\x7fELF\x02\x01\x01" + bytes(64)
    names = [
        b"interleave",
        b"streams",
        b"width",
        b"padding",
        b"iterators",
        b"exhausted",
        b"position",
        b"iterator",
    ]
    names += [b"taken", b"row", b"extend", b"stream"]
    signature = {"name": "interleave", "arg_names": ["streams", "width", "padding"]}
    kinds = {
        "bytecode": {f"{w}/weave/__pycache__/core.cpython-311.pyc": pyc()},
        "bytecode of another Python": {f"{w}/weave/__pycache__/core.cpython-39.pyc": pyc(magic=b"a\r\r\n")},
        "bytecode under another name": {
            f"{w}/weave/speed.dat.pyc": pyc(RENAMED.replace("weft", "interleave"))
        },
        "backup": {f"{w}/weave/core.py.orig": core},
        "editor's backup": {f"{w}/weave/core.py~": core},
        "swap file": {f"{w}/weave/.core.py.swp": b"b0VIM 8.2" + bytes(100) + core},
        "rejected patch": {
            f"{w}/core.rej": b"@@ -1 +1 @@\n" + b"".join(b"-" + x for x in FUNCTION.encode().splitlines(True))
        },
        "reversed patch": {f"{w}/fix.diff": b"".join(b"+" + x for x in FUNCTION.encode().splitlines(True))},
        "vendored copy": {f"{w}/weave/_vendor/other/core.py": core},
        "renamed copy": {f"{w}/weave/legacy.py": RENAMED.encode()},
        "comment": {f"{w}/NOTES.md": b"".join(b"# " + x for x in FUNCTION.encode().splitlines(True))},
        "numbered listing": {
            f"{w}/listing.txt": "".join(f"{n:4} {x}\n" for n, x in enumerate(FUNCTION.splitlines())).encode()
        },
        "notebook": {f"{w}/docs/tour.ipynb": notebook()},
        "generated docs": {f"{w}/docs/_modules/core.html": highlighted()},
        "UTF-16": {f"{w}/docs/core.txt": CORE.encode("utf-16")},
        "UTF-16 without a mark": {f"{w}/docs/core2.txt": CORE.encode("utf-16-le")},
        "Latin-1": {f"{w}/docs/core3.txt": b"\xe9\xe8\n" + core},
        "interface stub": {f"{w}/weave/core.pyi": b"def interleave(streams, width, padding=...): ...\n"},
        "extension module": {f"{w}/weave/core.cpython-311.so": elf + b"\0".join(names) + bytes(30)},
        "base64": {f"{w}/weave/data.json": json.dumps({"x": base64.b64encode(core).decode()}).encode()},
        "hexadecimal": {f"{w}/weave/data.yaml": b"x: " + core.hex().encode()},
        "escaped in JSON": {f"{w}/index.json": json.dumps({"text": CORE}).encode()},
        "mypy's JSON": {f"{w}/.mypy_cache/3.11/weave/core.data.json": json.dumps(signature).encode()},
        "mypy's database": {
            f"{w}/.mypy_cache/3.11/cache.0.db": sqlite(
                root, "path, data", ("weave/core.data.ff", b"\0\x0ainterleave\0\x07streams\0width\0padding")
            )
        },
        "pytest's cache": {f"{w}/.pytest_cache/v/cache/nodeids": json.dumps([hidden_ids]).encode()},
        "hypothesis's examples": {f"{w}/.hypothesis/examples/aa": b"\0\1" + hidden_ids.encode()},
        "coverage's database": {f"{w}/.coverage": sqlite(root, "id, context", (1, hidden_ids))},
        "coverage's pages": {f"{w}/htmlcov/core_py.html": highlighted()},
        "ruff's cache": {f"{w}/.ruff_cache/0.1/x": b"\0\1\2interleave\0"},
        "ctags": {
            f"{w}/tags": b'interleave\tweave/core.py\t/^def interleave(streams, width, padding=None):$/;"\tf\n'
        },
        "language server's index": {f"{w}/.cache/lsp/index.json": json.dumps(signature).encode()},
        "jedi's pickles": {
            f"{w}/.jedi/core.pkl": pickle.dumps({"lines": CORE.splitlines(keepends=True), "code": CORE})
        },
        "pickled bytecode": {f"{w}/memo.pkl": pickle.dumps({"code": pyc()})},
        "build folder": {f"{w}/build/lib/weave/core.py": core},
        "wheel": {f"{w}/dist/weave-1.0-py3-none-any.whl": zipped()},
        "egg": {"/home/agent/eggs/weave.egg": zipped()},
        "jar": {"/home/agent/.m2/weave.jar": zipped("x/Core.java")},
        "sdist": {"/home/agent/.cache/weave-1.0.tar.gz": tarred()},
        "tar.bz2": {"/tmp/weave.tar.bz2": tarred("w:bz2")},
        "tar.xz": {"/tmp/weave.tar.xz": tarred("w:xz")},
        "plain tar": {"/tmp/layer.tar": tarred("w:")},
        "archive in an archive": {"/tmp/image.tar": tarred("w:", tarred())},
        "gzip": {"/var/cache/core.py.gz": gzip.compress(core)},
        "bzip2": {"/var/cache/core.py.bz2": bz2.compress(core)},
        "xz": {"/var/cache/core.py.xz": lzma.compress(core)},
        "pip's cache": {"/home/agent/.cache/pip/http-v2/a/b/c.body": zipped()},
        "uv's cache": {"/home/agent/.cache/uv/archive-v0/x/weave/core.py": core},
        "another environment": {"/opt/venv/lib/python3.12/site-packages/weave/core.py": core},
        "Mercurial": {f"{w}/.hg/store/data/core.py.i": b"\0\1\0\1" + bytes(60) + zlib.compress(core)},
        "Subversion": {f"{w}/.svn/pristine/aa/aa.svn-base": core},
        "shell history": {"/home/agent/.bash_history": b"cat > core.py <<EOF\n" + core + b"EOF\n"},
        "Python history": {"/home/agent/.python_history": b"from weave.core import interleave\n"},
        "core file": {"/tmp/core.1234": b"\x7fELF" + bytes(500) + core + bytes(500)},
        "log of a failed attempt": {
            "/var/log/agent.log": b"".join(b"12:00 | " + x for x in core.splitlines(True))
        },
        "verifier's tests": {"/tests/test_core.py": HIDDEN.encode()},
        "solution": {"/solution/files/weave/core.py": core},
    }
    for number, (path, data) in enumerate(git_files(root).items()):
        kinds[("loose git object", "git bundle", "packed git object")[number]] = {path: data}
    if zstd := subprocess.run(["zstd", "-cq"], input=core, capture_output=True, check=False).stdout:
        kinds["zstd"] = {"/var/cache/core.py.zst": zstd}
    return kinds
