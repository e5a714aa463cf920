"""A stranger's first hour, from `init` to the report, with no setting typed by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_stranger_gets_from_their_repository_to_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A private package, a variable that tests need, a slow marker, classes in conftest, a model of one's own."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import first_hour

    figures = first_hour.first_hour(tmp_path / "stranger")
    typed = [each["command"] for each in figures["commands"]]
    assert not any(re.search(r" (?!max_body_lines)[a-z_.]+=[^=]", command) for command in typed)
    tasks = [path for path in (tmp_path / "stranger" / "tasks" / "ledger").iterdir() if path.is_dir()]
    assert sum((path / "instruction.md").is_file() for path in tasks) == 10
    run = tmp_path / "stranger" / "runs" / "ledger"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    practised = {each["step"] for each in steps if each["phase"] == "train"}
    assert practised == {0, 1} and {0, 2} <= {each["step"] for each in steps if each["phase"] == "eval"}
    assert (run / "report.html").is_file() and (run / "policy" / "tokenizer.json").is_file()
