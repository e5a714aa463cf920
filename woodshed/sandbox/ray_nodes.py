"""Sandboxes on the machines of a Ray cluster: an actor on every node holds that node's sandboxes.

The calling process keeps the attempts and their records; commands and tests run on the nodes. The layers, environments
and files of a spec travel there once, packed, so nodes share no file system. What a node must have of its own is what
bubblewrap needs, and the same Python as the calling machine, which environments point to.

    RAY_ADDRESS=auto woodshed train recipe.toml sandbox.provider=ray

Ray is imported by the first sandbox, and by nobody who uses another provider.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import os
import tarfile
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from woodshed.records import SandboxError
from woodshed.sandbox.bubblewrap import open_bubblewrap
from woodshed.sandbox.spec import WORKSPACE, Change, Result, Sandbox, SandboxSpec, Touch

CALLS_AT_ONCE = 512
"""Commands that one node's actor runs at the same time."""
LOST = Result("sandbox_lost", None, b"", b"the node has gone", False, 0.0)


@dataclass(frozen=True)
class Packed:
    """A file or folder of a spec on its way to a node."""

    name: str
    """Digest of its content."""
    path: Path


class NodeSandboxes:
    """The sandboxes of one node, in an actor there, and the files that they show.

    Args:
        folder: where these files are kept; by default one that is deleted when the actor ends.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="woodshed-node-") if folder is None else None
        self._folder = folder or Path(self._made.name if self._made else "")
        self._numbers = itertools.count()
        self._open: dict[int, Sandbox] = {}
        self._unpacking = threading.Lock()

    def lacks(self, names: Sequence[str]) -> list[str]:
        """Those that are not here yet."""
        return [name for name in names if not self._place(name).exists()]

    def unpack(self, name: str, data: bytes) -> None:
        """Keep a packed file or folder under its digest."""
        with self._unpacking:
            if self._place(name).exists():
                return
            partial = self._folder / f"{name}.partial"
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extractall(partial, filter="fully_trusted")  # packed by our own process
            partial.rename(self._place(name).parent)

    def open(self, spec: SandboxSpec) -> int:
        """The number of a new sandbox, whose paths are names of what was unpacked."""
        return self._keep(
            open_bubblewrap(
                replace(
                    spec,
                    lowers=tuple(self._place(str(name)) for name in spec.lowers),
                    environment=spec.environment and self._place(str(spec.environment)),
                    binds={inside: self._place(str(name)) for inside, name in spec.binds.items()},
                )
            )
        )

    def fork(self, number: int) -> int:
        """The number of a fork."""
        return self._keep(self._open[number].fork())

    def call(self, number: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Answer of a method of a sandbox."""
        return getattr(self._open[number], method)(*args, **kwargs)

    def close(self, number: int) -> None:
        """Close a sandbox; a command in it ends. Closing twice is fine."""
        if sandbox := self._open.pop(number, None):
            sandbox.close()

    def _keep(self, sandbox: Sandbox) -> int:
        number = next(self._numbers)
        self._open[number] = sandbox
        return number

    def _place(self, name: str) -> Path:
        return self._folder / name / "content"


@dataclass
class Node:
    """One machine of the cluster as the caller sees it."""

    name: str
    actor: Any
    sandboxes: int = 0
    has: set[str] = field(default_factory=set)
    """Digests of what was sent there."""
    sending: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Answer of its actor.

        Raises:
            SandboxError: the node has gone. Errors of the sandbox are raised as they are.
        """
        import ray  # pyright: ignore[reportMissingImports]  # an extra
        from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]

        try:
            return ray.get(getattr(self.actor, method).remote(*args, **kwargs))
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except RayError as error:
            raise NodeLostError(f"the node {self.name} of the cluster has gone ({error})") from error

    def receive(self, packed: Sequence[Packed]) -> None:
        """Send what the node lacks."""
        with self.sending:
            new = {each.name: each for each in packed if each.name not in self.has}
            for name in self.ask("lacks", list(new)) if new else []:
                self.ask("unpack", name, pack(new[name].path))
            self.has |= new.keys()


class NodeLostError(SandboxError):
    """A node of the cluster does not answer any more."""


class RaySandbox:
    """See `spec.Sandbox`. A sandbox on a node."""

    workspace = WORKSPACE

    def __init__(self, node: Node, number: int) -> None:
        self._node, self._number, self._closed = node, number, False
        node.sandboxes += 1

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 120.0,
        max_output: int = 1 << 20,
        channel: bool = False,
    ) -> Result:
        """See `spec.Sandbox`."""
        given = {"cwd": cwd, "env": env, "stdin": stdin, "timeout_s": timeout_s, "max_output": max_output}
        try:
            return self._ask("exec", command, **given, channel=channel)
        except NodeLostError:
            return LOST

    def read(self, path: str, most: int | None = None) -> bytes:
        """See `spec.Sandbox`."""
        return self._ask("read", path, most)

    def write(self, path: str, data: bytes) -> None:
        """See `spec.Sandbox`."""
        self._ask("write", path, data)

    def diff(self) -> list[Change]:
        """See `spec.Sandbox`."""
        return self._ask("diff")

    def altered(self, paths: Iterable[str]) -> list[str]:
        """See `spec.Sandbox`."""
        return self._ask("altered", list(paths))

    def touched(self) -> list[Touch]:
        """See `spec.Sandbox`."""
        return self._ask("touched")

    def fork(self) -> RaySandbox:
        """See `spec.Sandbox`."""
        self._refuse_closed()
        return RaySandbox(self._node, self._node.ask("fork", self._number))

    def alive(self) -> bool:
        """See `spec.Sandbox`."""
        try:
            return not self._closed and self._ask("alive")
        except SandboxError:
            return False

    def close(self) -> None:
        """See `spec.Sandbox`."""
        if self._closed:
            return
        self._closed = True
        self._node.sandboxes -= 1
        try:
            self._node.ask("close", self._number)
        except NodeLostError:
            return  # and all that ran there with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._refuse_closed()
        return self._node.ask("call", self._number, method, *args, **kwargs)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox is closed; open another one")


class RayNodes:
    """Provider of sandboxes on all nodes of a cluster; a new one goes to the node that has the fewest."""

    watches = True

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._changing = threading.Lock()
        self._names: dict[tuple[Path, int], str] = {}

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Open a sandbox on the least busy node; on another one where that has gone.

        Raises:
            SandboxError: Ray is not installed, no cluster or node answers, or the node cannot make one.
        """
        named, packed = self._packed(spec)
        while True:
            node = self._least_busy()
            try:
                node.receive(packed)
                return RaySandbox(node, node.ask("open", named))
            except NodeLostError:
                with self._changing:
                    self._nodes.pop(node.name, None)

    def _least_busy(self) -> Node:
        with self._changing:
            alive = _alive_nodes()
            for name in alive - self._nodes.keys():
                self._nodes[name] = Node(name, _start(name))
            for name in self._nodes.keys() - alive:
                del self._nodes[name]
            if not self._nodes:
                raise SandboxError("no node of the Ray cluster is alive; `ray status` lists them")
            return min(self._nodes.values(), key=lambda node: node.sandboxes)

    def _packed(self, spec: SandboxSpec) -> tuple[SandboxSpec, list[Packed]]:
        """The spec with digests for paths, and the files and folders of these digests."""
        packed: list[Packed] = []

        def name(path: Path) -> Path:
            if not path.exists():
                raise SandboxError(f"no {path} to show in a sandbox")
            key = path, path.stat().st_mtime_ns
            if key not in self._names or path.is_file():
                self._names[key] = digest(path)
            packed.append(Packed(self._names[key], path))
            return Path(self._names[key])

        named = replace(
            spec,
            lowers=tuple(name(path) for path in spec.lowers),
            environment=spec.environment and name(spec.environment),
            binds={inside: name(path) for inside, path in spec.binds.items()},
        )
        return named, packed


def _alive_nodes() -> set[str]:
    """Ids of the nodes that answer; connects to the cluster first.

    Raises:
        SandboxError: Ray is not installed, or there is no cluster at RAY_ADDRESS.
    """
    if importlib.util.find_spec("ray") is None:
        raise SandboxError("sandbox.provider = 'ray' needs Ray: `pip install 'woodshed[ray]'`")
    import ray  # pyright: ignore[reportMissingImports]

    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise SandboxError(
                f"no Ray cluster at {address!r} ({error}); start one with `ray start --head`, or name yours in "
                "RAY_ADDRESS"
            ) from error
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _start(node: str) -> Any:
    """The actor of a node, which ends with the calling process."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
        NodeAffinitySchedulingStrategy,
    )

    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_concurrency": CALLS_AT_ONCE,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(NodeSandboxes).options(**options).remote()


def digest(path: Path) -> str:
    """SHA-256 of a file's content, or of the names, modes, sizes and times in a folder; links are not followed."""
    total = hashlib.sha256()
    for each in sorted([path, *path.rglob("*")] if path.is_dir() else [path]):
        facts = each.lstat()
        total.update(f"{each.relative_to(path)}\0{facts.st_mode}\0".encode())
        if each.is_symlink():
            total.update(str(each.readlink()).encode())
        elif each.is_file():
            total.update(f"{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
            if each == path:
                total.update(each.read_bytes())
    return total.hexdigest()


def pack(path: Path) -> bytes:
    """A file or folder as a tar archive with one member, "content"."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        archive.add(path, "content")
    return held.getvalue()
