"""Sandboxes on the nodes of a Ray cluster: what travels there, and what is answered when a node goes.

The node's side is tested in this process; `pytest -m slow` starts a cluster of two nodes on this machine, where Ray is
installed.
"""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from woodshed import grading, tasks
from woodshed.records import SandboxError, Task
from woodshed.sandbox import Limits, SandboxSettings, SandboxSpec, ray_nodes
from woodshed.sandbox.ray_nodes import (
    LOST,
    Node,
    NodeLostError,
    NodeSandboxes,
    RayNodes,
    RaySandbox,
    digest,
    pack,
)


class Here(Node):
    """A node whose actor is an object of this process, until it goes."""

    gone = False

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.gone:
            raise NodeLostError(f"the node {self.name} of the cluster has gone")
        return getattr(self.actor, method)(*args, **kwargs)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[RayNodes, list[Here]]]:
    """A provider over two nodes."""
    both = [Here(name, NodeSandboxes(tmp_path / name)) for name in ("one", "two")]
    provider = RayNodes()
    provider._nodes = {node.name: node for node in both}
    monkeypatch.setattr(ray_nodes, "_alive_nodes", lambda: {node.name for node in both if not node.gone})
    yield provider, both
    for node in both:
        for number in list(node.actor._open):
            node.actor.close(number)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "text").write_text("as it was")
    (folder / "run").write_text("#!/bin/sh\necho ran\n")
    (folder / "run").chmod(0o755)
    (folder / "link").symlink_to("deep/text")
    return folder


def test_a_sandbox_on_a_node_does_what_one_here_does(nodes: tuple[RayNodes, list[Here]], workspace: Path):
    secret = workspace.parent / "secret"
    secret.write_text("bound")
    spec = SandboxSpec((workspace,), binds={"/secret": secret}, watch=(), limits=Limits(file_mb=1))
    with nodes[0].open(spec) as sandbox:
        result = sandbox.exec(
            "./run; cat link /secret; echo more > deep/text; cat >&3", stdin=b"in", channel=True
        )
        assert (result.outcome, result.stdout, result.channel) == ("ok", b"ran\nas it wasbound", b"in")
        sandbox.write("new/file", b"1")
        assert sandbox.read("new/file") == b"1"
        assert [(each.path, each.kind) for each in sandbox.diff() if each.file_type == "file"] == [
            ("deep/text", "modified"),
            ("new/file", "added"),
        ]
        assert sandbox.altered(["deep/text", "run"]) == ["deep/text"]
        assert any(touch.path == "/workspace/run" for touch in sandbox.touched())
        with pytest.raises(FileNotFoundError):
            sandbox.read("nothing")
        with pytest.raises(OSError, match="large") as raised:
            sandbox.exec("head -c 1100000 /dev/zero > large || :")
            sandbox.read("large", most=10)
        assert raised.value.errno == errno.EFBIG
        with sandbox.fork() as twin:
            twin.write("deep/text", b"of the twin")
            assert sandbox.read("deep/text") == b"more\n"
    with pytest.raises(SandboxError, match="closed"):
        sandbox.read("run")
    assert (workspace / "deep" / "text").read_text() == "as it was"


def test_what_is_shown_is_sent_once_to_each_node_and_again_when_it_changed(
    nodes: tuple[RayNodes, list[Here]], workspace: Path, monkeypatch: pytest.MonkeyPatch
):
    sent: list[Path] = []
    monkeypatch.setattr(ray_nodes, "pack", lambda path: sent.append(path) or pack(path))
    provider, _ = nodes
    first, second, third = (provider.open(SandboxSpec((workspace,))) for _ in range(3))
    assert sent == [workspace] * 2, "the least busy node gets the next one"
    secret = workspace.parent / "secret"
    for text in ("a", "b"):
        secret.write_text(text)
        os.utime(secret, (0, 0))
        with provider.open(SandboxSpec((workspace,), binds={"/secret": secret})) as sandbox:
            assert sandbox.exec("cat /secret").stdout == text.encode()
    for each in (first, second, third):
        each.close()
    with pytest.raises(SandboxError, match=r"no .*nowhere to show"):
        provider.open(SandboxSpec((workspace / "nowhere",)))


def test_a_node_that_goes_takes_its_sandboxes_and_the_next_is_opened_elsewhere(
    nodes: tuple[RayNodes, list[Here]], workspace: Path
):
    provider, both = nodes
    sandbox = provider.open(SandboxSpec((workspace,)))
    assert isinstance(sandbox, RaySandbox)
    sandbox._node.gone = True  # pyright: ignore[reportAttributeAccessIssue]
    assert sandbox.exec("true") == LOST
    assert not sandbox.alive()
    with pytest.raises(SandboxError, match="has gone"):
        sandbox.read("run")
    with provider.open(SandboxSpec((workspace,))) as other:
        assert other.exec("true").outcome == "ok"
    sandbox.close()
    for node in both:
        node.gone = True
    with pytest.raises(SandboxError, match="no node of the Ray cluster is alive"):
        provider.open(SandboxSpec((workspace,)))


def test_a_digest_tells_folders_apart(workspace: Path):
    before = digest(workspace)
    assert digest(workspace) == before
    for change in (
        lambda: (workspace / "run").chmod(0o644),
        lambda: (workspace / "deep" / "text").write_text("other"),
        lambda: (workspace / "empty").mkdir(),
        lambda: ((workspace / "link").unlink(), (workspace / "link").symlink_to("run")),
    ):
        change()
        now = digest(workspace)
        assert now != before
        before = now


def test_grading_on_a_node_gives_the_same_verdict(nodes: tuple[RayNodes, list[Here]], tiny_task: Task):
    verdict = grading.grade(tiny_task, tasks.gold_patch(tiny_task), nodes[0])
    assert verdict.solved, verdict.detail


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_way_out_is_said():
    with pytest.raises(SandboxError, match=r"needs Ray: `pip install 'woodshed\[ray\]'`"):
        SandboxSettings(provider="ray").check()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_two_nodes_of_a_cluster_and_then_one(
    workspace: Path, tiny_task: Task, monkeypatch: pytest.MonkeyPatch
):
    from ray.cluster_utils import Cluster  # pyright: ignore

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        provider = SandboxSettings(provider="ray").create()
        first, other = (provider.open(SandboxSpec((workspace,))) for _ in range(2))
        assert isinstance(first, RaySandbox)
        assert isinstance(other, RaySandbox)
        assert first._node.name != other._node.name
        assert grading.grade(tiny_task, tasks.gold_patch(tiny_task), provider).solved
        with pytest.raises(FileNotFoundError):
            first.read("nothing")
        cluster.remove_node(second)
        results = [sandbox.exec("./run").outcome for sandbox in (first, other)]
        assert sorted(results) == ["ok", "sandbox_lost"]
        assert grading.grade(tiny_task, tasks.gold_patch(tiny_task), provider).solved
        for sandbox in (first, other):
            sandbox.close()
    finally:
        import ray  # pyright: ignore[reportMissingImports]

        ray.shutdown()
        cluster.shutdown()
