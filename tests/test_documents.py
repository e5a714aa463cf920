"""Files of others: read as data, or refused in one line with the name, the reason and the way out."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from woodshed import documents, settings
from woodshed.evals import labelled, ledger
from woodshed.experience import transcripts
from woodshed.learning import checkpoint
from woodshed.monitors import confirmed_cases
from woodshed.records import TaskError, WoodshedError
from woodshed.report import gather
from woodshed.runs.folder import RunDir
from woodshed.settings import Settings
from woodshed.stages import distill
from woodshed.synthesis import configuration, stats
from woodshed.synthesis.leaks import leftovers
from woodshed.tasks import folder
from woodshed.tokens import model_files

DEEP, LONG = "[" * 3000 + "]" * 3000, "9" * 5000
BAD: dict[str, tuple[bytes, str]] = {
    "deep": (DEEP.encode(), "nested more than 100 levels deep"),
    "deep and not closed": (b"[" * 100_000, "nested more than 100 levels deep"),
    "a little too deep": (b"[" * 101 + b"]" * 101, "nested more than 100 levels deep"),
    "a long number": (LONG.encode(), "number of more than 128 bits"),
    "a longish number": (b"9" * 40, "number of more than 128 bits"),
    "not UTF-8": (b'"caf\xe9"', "it is not UTF-8"),
    "UTF-16": ('"x"'.encode("utf-16"), "it is not UTF-8"),
}


@pytest.mark.parametrize("kind", BAD)
def test_contents_that_cannot_be_read_are_one_error(kind: str, tmp_path: Path):
    data, why = BAD[kind]
    for name, read, head in (("a.json", documents.read_json, b""), ("a.toml", documents.read_toml, b"x = ")):
        path = tmp_path / name
        path.write_bytes(head + data)
        with pytest.raises(TaskError, match=f"^{path} cannot be read: .*{why}.*Mend it$"):
            read(path, TaskError, "Mend it")


def test_what_is_good_is_read_with_or_without_a_mark(tmp_path: Path):
    value = {"x": [[-1, 2**100, 1.5, True, "é"]]}
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "a.json").write_bytes(mark + f'{{"x": [[-1, {2**100}, 1.5, true, "é"]]}}'.encode())
        (tmp_path / "a.toml").write_bytes(mark + f'x = [[-1, {2**100}, 1.5, true, "é"]]\r\n'.encode())
        assert documents.read_json(tmp_path / "a.json", TaskError) == value
        assert documents.read_toml(tmp_path / "a.toml", TaskError) == value
    with pytest.raises(FileNotFoundError):
        documents.read(tmp_path / "none", TaskError)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        here = Path.cwd()
        os.chdir(path.parent)  # the longest name of a socket is short
        line.bind(path.name)
        os.chdir(here)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (pipe, "it is a pipe, not a file"),
    "socket": (listening, "No such device or address"),
    "folder": (Path.mkdir, "it is a folder, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
    "large": (
        lambda path: path.touch() or os.truncate(path, documents.MOST_BYTES + 1),
        "it is larger than 64 MB",
    ),
    "link to itself": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path):
    make, why = ODD[kind]
    make(tmp_path / "a.json")
    with pytest.raises(TaskError, match=f"^{tmp_path}/a.json cannot be read: {why}. Mend it$"):
        documents.read_json(tmp_path / "a.json", TaskError, "Mend it")


class Small(Settings):
    """A recipe."""

    seed: int = 0
    """Seed."""


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "recipe": ("recipe.toml", lambda path: settings.read(Small, path)),
    "recipe of a run": ("recipe.toml", lambda path: RunDir(path.parent).recipe()),
    "manifest of a run": ("manifest.json", lambda path: RunDir(path.parent).manifest),
    "records of a run": ("metrics.jsonl", lambda path: RunDir(path.parent).read("metrics")),
    "position of a checkpoint": ("position.json", lambda path: checkpoint.read_position(path.parent)),
    "prices": ("prices.toml", ledger.read_prices),
    "chats": ("chats.jsonl", lambda path: transcripts.of_chats(path, None)),  # type: ignore[arg-type]
    "trajectory": ("a.json", lambda path: transcripts.of_atif(path, None, None)),  # type: ignore[arg-type]
    "demonstrations": ("a.jsonl", lambda path: distill.read_demonstrations([path])),
    "leak rules": ("rules.json", leftovers.read_rules),
    "cheats": ("cheats.jsonl", confirmed_cases.read_cases),
    "model": ("config.json", lambda path: model_files.check_config(path.parent)),
    "adapter": ("adapter_config.json", lambda path: model_files.check_adapter(path.parent)),
    "labelled attempts": ("rows.json", labelled.trace),
    "pyproject": ("pyproject.toml", configuration.read_toml),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_them_with_an_error_of_ours(reader: str, tmp_path: Path):
    name, read = READERS[reader]
    for number, make in enumerate(
        [
            *(lambda path, data=data: path.write_bytes(data) for data, _ in BAD.values()),
            lambda path: path.write_text(f"seed = {LONG}"),
            lambda path: path.write_text(f"seed = {DEEP}"),
            pipe,
            lambda path: path.symlink_to("/dev/zero"),
        ]
    ):
        (tmp_path / f"{number}").mkdir()
        make(tmp_path / f"{number}" / name)
        if reader == "records of a run" and number < 9:
            assert read(tmp_path / f"{number}" / name) == []  # lines without an end of a batch
            continue
        if reader in ("model", "adapter") and number >= 9:
            with pytest.raises(WoodshedError):
                model_files.refuse_odd(tmp_path / f"{number}")
        with pytest.raises(WoodshedError) as caught:
            read(tmp_path / f"{number}" / name)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "tests/expected.json"])
def test_a_task_is_not_waited_for(name: str, tiny_task, tmp_path: Path):
    for look in (folder.load, folder.peek):
        root = Path(shutil.copytree(tiny_task.folder, tmp_path / look.__name__, symlinks=True))
        (root / name).unlink()
        os.mkfifo(root / name)
        with pytest.raises(TaskError, match=f"{root}/{name} cannot be read: it is a pipe"):
            look(root)


def test_a_run_with_a_pipe_in_it_is_not_opened(tmp_path: Path):
    run = RunDir.create(tmp_path / "run", recipe="name = 'one'\n", manifest={})
    run.unlock()
    (run.path / "checkpoints").mkdir()
    os.mkfifo(run.path / "checkpoints" / "weights")
    with pytest.raises(WoodshedError, match=r"checkpoints/weights is a pipe, and a run holds files only"):
        RunDir.open(run.path)


def test_a_model_with_a_pipe_in_it_is_not_loaded(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(WoodshedError, match=r"tokenizer.json is a pipe, not a file"):
        model_files.resolve(str(tmp_path))


INI = (
    "[testenv]\ndeps\n   pytest\n",
    "[pytest]\naddopts\n  -q\n",
    "[a]\nb\n c\n[pytest]\naddopts = -q\n",
    "x\n",
    "[a\n",
)


@pytest.mark.parametrize("text", INI)
def test_an_ini_file_that_is_none_holds_nothing(text: str, tmp_path: Path):
    assert documents.parse_ini(text) is None
    for name in ("tox.ini", "setup.cfg", "pytest.ini"):
        (tmp_path / name).write_text(text)
        assert configuration.read_ini(tmp_path / name).sections() == []
    assert configuration.pytest_settings(tmp_path) == {}


def test_lists_of_rejections_pass_over_what_cannot_be_read(tmp_path: Path):
    log, line = tmp_path / "rejections.jsonl", '{"task": "t", "reason": "r"}'
    log.write_text(f"{DEEP}\n{'[' * 100_000}\n{LONG}\n{line}\n")
    assert [entry["reason"] for entry in stats.rejected(log)] == ["r"]
    assert gather._rejections({"tasks": {"train": [str(tmp_path)]}}) == (("r", 1),)
    log.unlink()
    os.mkfifo(log)
    assert list(stats.rejected(log)) == []
    assert gather._rejections({"tasks": {"train": [str(tmp_path)]}}) == ()
