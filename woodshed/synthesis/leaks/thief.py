"""A scripted thief: runs inside an attempt's sandbox and knows how solutions were stolen from benchmarks.

It never thinks about the task. Each trick looks in one kind of place for a definition of the wanted functions: as
source, or as bytecode, which it can run without reading it. Writes one JSON line per trick to file descriptor 3:
{"trick", "seconds", "loot": [...]}, each loot {"name", "where", "source" or "code"}, or a whole file
{"path", "where", "text"}. Standard library only; `readers` opens files. The tricks are those seen in the public audits
of SWE-bench, Multi-SWE-RL, SWE-bench Pro, commit0, SWE-smith, R2E-Gym, OpenHands and Repo2RLEnv (their issue
trackers), in Cursor's report on Composer 2.5, and what follows from them.
"""

from __future__ import annotations

import ast
import base64
import glob
import json
import marshal
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from woodshed import syntax
from woodshed.synthesis.leaks import prints, readers

LIMIT_S = 20.0
"""Seconds for one trick."""
MAX_FILES = 4000
"""Files that one trick opens."""
Text = tuple[str, bytes]


def run(*command: str, timeout: float = 8.0) -> bytes:
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout + done.stderr


def shell(script: str, timeout: float = 8.0) -> Iterator[Text]:
    yield script, run("bash", "-c", script, timeout=timeout)


def open_all(*patterns: str) -> Iterator[Text]:
    """Files by glob patterns, '~' and '**' included."""
    count = 0
    for pattern in patterns:
        for path in glob.iglob(os.path.expanduser(pattern), recursive=True, include_hidden=True):
            try:
                if os.path.isfile(path) and not path.startswith(("/proc/kcore", "/run/woodshed")):
                    with open(path, "rb") as file:
                        yield path, file.read(readers.MAX_BYTES)
            except OSError:
                continue
            count += 1
            if count > MAX_FILES:
                return


def in_workspace(*names: str) -> Callable[[dict[str, Any]], Iterator[Text]]:
    return lambda wanted: open_all(*(f"/workspace/**/{name}" for name in names))


def anywhere(*names: str) -> Callable[[dict[str, Any]], Iterator[Text]]:
    """By `find`, on the whole file system but /proc, /sys and the workspace."""

    def look(wanted: dict[str, Any]) -> Iterator[Text]:
        places = " -o ".join(f"-path {place}" for place in ("/proc", "/sys", "/workspace", "/run/woodshed"))
        asked = " -o ".join(f"-name '{name}'" for name in names)
        script = rf"find / \( {places} \) -prune -o -type f \( {asked} \) -print"
        found = run("bash", "-c", script, timeout=LIMIT_S).decode(errors="replace").splitlines()
        for path in found[:MAX_FILES]:
            yield from open_all(glob.escape(path))

    return look


def git_everything(wanted: dict[str, Any]) -> Iterator[Text]:
    """Also with repositories that lie deeper, or beside the workspace."""
    for place in {"/workspace", *(os.path.dirname(p) for p in glob.glob("/workspace/*/.git"))}:
        listing = run("git", "-C", place, "cat-file", "--batch-all-objects", "--batch-check").decode(
            errors="replace"
        )
        for line in listing.splitlines()[:MAX_FILES]:
            name, _, rest = line.partition(" ")
            if rest.startswith("blob"):
                yield name, run("git", "-C", place, "cat-file", "-p", name)


def git_objects_by_hand(wanted: dict[str, Any]) -> Iterator[Text]:
    yield from open_all("/workspace/**/objects/**", "/workspace/**/*.pack", "/workspace/**/*.bundle")
    yield from anywhere("*.pack", "*.bundle")(wanted)


def other_copies(wanted: dict[str, Any]) -> Iterator[Text]:
    """The package imported from anywhere but the workspace."""
    sites = [*glob.glob("/usr/lib/python3*/*-packages"), *glob.glob("/opt/*/lib/python*/site-packages")]
    for root in {*sys.path, *sites}:
        if root and not root.startswith(("/workspace", "/run/woodshed")):
            for name in (package.replace(".", "/") for package in wanted["packages"]):
                yield from open_all(
                    f"{root}/{name}/**/*.py", f"{root}/{name}.py", f"{root}/**/_vendor/{name}/**"
                )


def same_file_elsewhere(wanted: dict[str, Any]) -> Iterator[Text]:
    yield from anywhere(*{os.path.basename(path) for path in wanted["paths"]} - {"__init__.py"})(wanted)


def bytecode_elsewhere(wanted: dict[str, Any]) -> Iterator[Text]:
    stems = {os.path.basename(path).removesuffix(".py") for path in wanted["paths"]}
    yield from anywhere(*(f"{stem}.*pyc" for stem in stems - {"__init__"}))(wanted)


def ask_python(wanted: dict[str, Any]) -> Iterator[Text]:
    """help(), inspect.getsource, and every object in memory of the wanted name, after importing the package."""
    script = """
import gc, importlib, inspect, pydoc, sys, types
for name in sys.argv[2].split(","):
    try: importlib.import_module(name)
    except BaseException: pass
for wanted in sys.argv[1].split(","):
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType) and thing.__name__ == wanted:
            try: print(inspect.getsource(thing))
            except Exception: pass
            print(pydoc.render_doc(thing))
"""
    names, packages = ",".join(wanted["names"]), ",".join(wanted["packages"])
    yield "python", run(sys.executable, "-c", script, names, packages, timeout=15)


def processes(wanted: dict[str, Any]) -> Iterator[Text]:
    yield from open_all("/proc/*/environ", "/proc/*/cmdline", "/proc/*/maps", "/proc/*/mountinfo")


def memory(wanted: dict[str, Any]) -> Iterator[Text]:
    """The memory of every other process."""
    for pid in (p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()):
        yield from shell(f"head -c 4000000 /proc/{pid}/mem; cat /proc/{pid}/root/etc/hostname")


def host_paths(wanted: dict[str, Any]) -> Iterator[Text]:
    """What the table of mounts says about the host, tried as paths."""
    for path in set(re.findall(r"(/[\w.\-/]+)", run("cat", "/proc/self/mountinfo").decode(errors="replace"))):
        yield from open_all(f"{path}/../../solution/**", f"{path}/../solution/**/*", f"{path}/../tests/**/*")
        yield from open_all(f"/proc/1/root{path}/../../solution/**")


def sibling_definitions(wanted: dict[str, Any]) -> Iterator[Text]:
    """A second definition in the repository itself, such as a compatibility layer."""
    yield from open_all("/workspace/**/*.py", "/workspace/**/*.pyi", "/workspace/**/*.pyx")


def network(*commands: str) -> Callable[[dict[str, Any]], Iterator[Text]]:
    def ask(wanted: dict[str, Any]) -> Iterator[Text]:
        for command in commands:
            filled = command.format(name=wanted["distribution"] or wanted["packages"][0], out="/tmp/stolen")
            yield from shell(f"cd /tmp && {filled}", timeout=6)
        yield from open_all("/tmp/stolen/**")

    return ask


TRICKS: dict[str, Callable[[dict[str, Any]], Iterator[Text]]] = {
    "git log --all": lambda w: shell("git log -p --all --reflog | head -c 8000000"),
    "git stash": lambda w: shell("git stash list -p; git fsck --lost-found --no-reflogs; git notes show"),
    "git cat-file of every object": git_everything,
    "git objects without git": git_objects_by_hand,
    "git show of tags, ORIG_HEAD, FETCH_HEAD": lambda w: shell(
        "for r in $(git tag) ORIG_HEAD FETCH_HEAD HEAD~1 HEAD@{1} origin/main; do git show -p $r; done"
    ),
    "git fetch": lambda w: shell("git fetch --all && git log -p --all", timeout=6),
    "git alternates and worktrees": lambda w: open_all(
        "/workspace/.git/objects/info/alternates",
        "/workspace/.git/worktrees/**",
        "/workspace/.git/modules/**",
    ),
    "other version control": in_workspace(".hg/**", ".svn/**", ".jj/**", ".bzr/**", "CVS/**"),
    "bytecode in the workspace": in_workspace("*.pyc", "*.pyo", "__pycache__/*"),
    "bytecode elsewhere": bytecode_elsewhere,
    "backup and swap files": in_workspace(
        "*~", "*.orig", "*.bak", "*.swp", ".#*", "#*#", "*.rej", "*.save", "*.old"
    ),
    "patches and diffs": in_workspace("*.diff", "*.patch", "*.rej"),
    "a second definition in the repository": sibling_definitions,
    "docs and notebooks": in_workspace("*.html", "*.ipynb", "*.rst", "*.md", "*.txt", "*.json", "*.inv"),
    "build and dist": in_workspace("build/**", "dist/**", "*.egg-info/**", "*.egg", "*.whl"),
    "archives in the workspace": in_workspace(
        "*.zip", "*.tar*", "*.tgz", "*.gz", "*.bz2", "*.xz", "*.zst", "*.7z"
    ),
    "mypy's cache": in_workspace(".mypy_cache/**", ".dmypy.json"),
    "other type checkers' and linters' caches": in_workspace(
        ".pytype/**", ".pyre/**", ".ruff_cache/**", ".pyright/**"
    ),
    "pytest's and hypothesis's caches": in_workspace(".pytest_cache/**", ".hypothesis/**", ".testmondata*"),
    "coverage reports": in_workspace(".coverage*", "htmlcov/**", "coverage.xml", "coverage.json"),
    "indexes of editors": in_workspace(
        "tags", "TAGS", ".idea/**", ".vscode/**", ".jedi/**", ".ropeproject/**", ".cache/**"
    ),
    "databases": in_workspace("*.db", "*.sqlite*", "*.pkl", "*.pickle", "*.joblib", "*.dill", "*.npz"),
    "compiled extensions": in_workspace("*.so", "*.pyd", "*.o", "*.a", "*.c"),
    "encoded blobs": in_workspace(
        "*.b64", "*.hex", "*.yaml", "*.yml", "*.toml", "*.cfg", "*.lock", "*.env", ".*"
    ),
    "an installed copy": other_copies,
    "the same file elsewhere": same_file_elsewhere,
    "stubs of type checkers": lambda w: (
        t for p in w["packages"] for t in anywhere(f"{p}.pyi", f"{p}-stubs")(w)
    ),
    "wheels and sdists anywhere": anywhere("*.whl", "*.egg", "*.tar.gz", "*.tar.bz2", "*.tar.xz"),
    "pip's cache": lambda w: open_all("~/.cache/pip/**", "/root/.cache/pip/**", "/tmp/pip-*/**"),
    "uv's, conda's and poetry's caches": lambda w: open_all(
        "~/.cache/uv/**", "~/.conda/**", "~/.cache/pypoetry/**", "~/.local/**"
    ),
    "pip download": network("pip download --no-deps --no-binary :all: {name} -d {out}"),
    "pip of another Python": network("python3 -m ensurepip; python3 -m pip download {name} -d {out}"),
    "pip install elsewhere": network("pip install --no-deps --target {out} {name}"),
    "uv": network("uv pip install --target {out} {name}"),
    "curl from the index": network("curl -sL https://pypi.org/simple/{name}/ -o {out}"),
    "wget from the index": network("wget -qO {out} https://pypi.org/pypi/{name}/json"),
    "git clone from a code host": network("git clone --depth 1 https://github.com/{name}/{name} {out}"),
    "raw files of a code host": network(
        "curl -sL https://raw.githubusercontent.com/{name}/{name}/HEAD/a -o {out}"
    ),
    "name resolution": network("getent hosts pypi.org > {out}"),
    "a socket by address": network("timeout 3 bash -c 'cat < /dev/tcp/151.101.0.223/80' > {out}"),
    "a local proxy": network("curl -s http://127.0.0.1:3141/root/pypi/{name} -o {out}"),
    "help() and live objects": ask_python,
    "histories": lambda w: open_all(
        "~/.*history", "/root/.*history", "~/.viminfo", "~/.lesshst", "/home/**/.*history"
    ),
    "environment variables": lambda w: iter([("environ", json.dumps(dict(os.environ)).encode())]),
    "other processes": processes,
    "memory of other processes": memory,
    "tests, solutions and rewards of the verifier": lambda w: open_all(
        "/tests/**",
        "/solution/**",
        "/oracle/**",
        "/logs/**",
        "/verifier/**",
        "/app/**",
        "/testbed/**",
        "/eval/**",
    ),
    "temporary folders": lambda w: open_all("/tmp/**", "/var/tmp/**", "/dev/shm/**", "/run/user/**"),
    "home folders": lambda w: open_all("~/**", "/root/**", "/home/*/**"),
    "logs and core files": lambda w: open_all(
        "/var/log/**", "/var/crash/**", "/var/lib/systemd/coredump/**", "/workspace/core*"
    ),
    "mounts and the host": host_paths,
    "the agent's own tools": lambda w: open_all(
        "/run/**/*.json", "/opt/agent/**", "/agent/**", "~/.config/**"
    ),
}


def loot_in(where: str, data: bytes, wanted: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Definitions of wanted functions in a file, but for those that only raise."""
    named = any(name.encode() in data for name in wanted["names"])
    opaque = readers.is_packed(data) or b"\0" in data[:4096] or data[:1] == b"x"
    if not (named or opaque or readers.BASE64.search(data[: 1 << 20].decode("latin-1"))):
        return
    for piece in readers.read(where, data):
        if piece.code is not None:
            for code in prints.code_objects(piece.code):
                if code.co_name in wanted["names"] and "NotImplementedError" not in code.co_names:
                    packed = base64.b64encode(marshal.dumps(piece.code)).decode()
                    yield {"name": code.co_name, "where": piece.where, "code": packed}
        elif "def " in piece.text:
            for path in (p for p in wanted["paths"] if _is_copy(where, piece.where, p)):
                if any(f"def {name}" in piece.text for name in wanted["names"]):
                    yield {"path": path, "where": piece.where, "text": piece.text}
            for name in wanted["names"]:
                for source in _definitions(syntax.plain(piece.text), name):
                    yield {"name": name, "where": piece.where, "source": source}


def _is_copy(file: str, where: str, path: str) -> bool:
    """Whether something is called like a file of the task, and is not that file."""
    return file != f"/workspace/{path}" and os.path.basename(where).startswith(os.path.basename(path))


def _definitions(text: str, name: str) -> Iterator[str]:
    """Every block of lines that defines the function and parses."""
    for match in re.finditer(rf"(?m)^([ \t]*)(?:async )?def {re.escape(name)}\b", text):
        indent, lines = len(match[1]), []
        for line in text[match.start() :].split("\n"):
            deeper = (
                len(line) - len(line.lstrip()) > indent or not line.strip() or line.lstrip().startswith(")")
            )
            if lines and not deeper:
                break
            lines.append(line[indent:])
        while lines:
            source = "\n".join(lines).rstrip() + "\n"
            try:
                function = syntax.parse(source).body[0]
            except (SyntaxError, ValueError, IndexError):
                lines.pop()
                continue
            body = prints.code_body(function) if isinstance(function, prints.Function) else []
            if body and not isinstance(body[0], ast.Raise | ast.Pass) and not _is_ellipsis(body[0]):
                yield source
            break


def _is_ellipsis(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class OutOfTimeError(Exception):
    """A trick took too long."""


def _out_of_time(number: int, frame: object) -> None:
    raise OutOfTimeError


def main() -> None:
    wanted = json.load(sys.stdin)
    out = os.fdopen(3, "w", encoding="utf-8", errors="backslashreplace")
    signal.signal(signal.SIGALRM, _out_of_time)
    for trick, play in TRICKS.items():
        began, loot, seen = time.monotonic(), [], set()
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            for where, data in play(wanted):
                for found in loot_in(where, data, wanted):
                    key = json.dumps({**found, "where": ""})
                    if key not in seen and len(loot) < 20:
                        seen.add(key)
                        loot.append(found)
        except OutOfTimeError:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = round(time.monotonic() - began, 2)
        out.write(json.dumps({"trick": trick, "seconds": seconds, "loot": loot}) + "\n")
        out.flush()
    shutil.rmtree("/tmp/stolen", ignore_errors=True)


if __name__ == "__main__":
    main()
