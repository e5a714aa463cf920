"""Bytecode is kept for files as they are, and never taken for a file that was edited."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from conftest import tiny_environment

from woodshed.sandbox import BUBBLEWRAP, SandboxSpec
from woodshed.synthesis import bytecode
from woodshed.tasks import prepare


def test_an_edit_of_the_same_length_is_seen(tmp_path: Path):
    tree = tmp_path / "tree"
    for path, text in {
        "tally/__init__.py": "ONE = 1\n",
        "tally/more.py": "TWO = 2\n",
        "test_tally.py": "from tally import ONE, more\n\n\ndef test_one():\n    assert ONE == 1\n",
    }.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    spec = SandboxSpec((tree,), prepare(tiny_environment()), env={"PYTHONPATH": "/workspace"})
    layer = bytecode.kept(spec, tree, tmp_path / "layer", 60, BUBBLEWRAP)
    names = {path.relative_to(layer).as_posix().partition(".cpython")[0] for path in layer.rglob("*.pyc")}
    assert names == {"tally/__pycache__/__init__", "tally/__pycache__/more", "__pycache__/test_tally"}
    with BUBBLEWRAP.open(dataclasses.replace(spec, lowers=(tree, layer))) as sandbox:
        sandbox.write("tally/__init__.py", b"ONE = 7\n")
        verbose = 'python -v -c "import tally.more; print(tally.ONE, tally.more.TWO)"'
        done = sandbox.exec(verbose, timeout_s=60)
        tested = sandbox.exec("python -m pytest -q test_tally.py", timeout_s=60)
    assert done.stdout.split() == [b"7", b"2"]
    assert b"code object from '/workspace/tally/__pycache__/more" in done.stderr, "read, not compiled"
    assert b"1 failed" in tested.stdout


def test_what_cannot_be_collected_has_no_bytecode(tmp_path: Path):
    spec = SandboxSpec((tmp_path,), prepare(tiny_environment()))
    assert list(bytecode.kept(spec, tmp_path, tmp_path / "layer", 60, BUBBLEWRAP).iterdir()) == []
