"""Rows of a benchmark's JSON, written as each is measured: a second call goes on where the first was stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from woodshed.runs import machine


class Rows:
    """The rows of one file. A file that was written under other settings is begun anew.

    Rows are told apart by `key`; what was expected before the run stands beside what was found.
    """

    def __init__(
        self, path: Path, settings: dict[str, Any], *, key: tuple[str, ...], commit: str = ""
    ) -> None:
        self.path, self.key = path, key
        self.report: dict[str, Any] = {"settings": {name: str(value) for name, value in settings.items()}}
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            found = json.loads(path.read_text())
            if found.get("settings") == self.report["settings"]:
                self.rows = found["rows"]
        self.commit = commit or machine.revision()

    def has(self, **key: Any) -> bool:
        """Whether the row of this key was measured."""
        return any(all(row[name] == key[name] for name in self.key) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Print a row and write the file."""
        self.rows.append(row)
        print("  ".join(f"{name}={_short(value)}" for name, value in row.items()), flush=True)
        self.write()

    def write(self, **more: Any) -> None:
        """The file, with more beside the rows."""
        self.report |= more
        about = {"commit": self.commit, "load": os.getloadavg()[0], "machine": machine.describe()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"rows": self.rows, **self.report, **about}, indent=2) + "\n")
        partial.replace(self.path)


def spread(values: list[float]) -> list[float]:
    """[least, median, most], in four digits."""
    in_order = sorted(values)
    middle = len(in_order) // 2
    median = in_order[middle] if len(in_order) % 2 else (in_order[middle - 1] + in_order[middle]) / 2
    return [float(f"{value:.4g}") for value in (in_order[0], median, in_order[-1])]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "/".join(_short(each) for each in value) if isinstance(value, list) else str(value)
