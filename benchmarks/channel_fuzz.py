"""Random messages, near valid ones, to the process that decides on tests: none may harm it or learn what it holds.

    python benchmarks/channel_fuzz.py [--seconds 600]

What is sent is `fuzz` of tests/test_isolation.py, in slices, each with a seed of its own. Each slice that passed is
kept in --out, so that the command can be stopped at any time, and goes on when it is given again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

from woodshed.runs import machine
from woodshed.runs.files import write_atomically

ROOT = Path(__file__).parent.parent
SLICE_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Random messages to the process that decides on tests.")
    parser.add_argument("--seconds", type=float, default=600.0, help="in all, with those of earlier calls")
    out = Path(__file__).parent / "results" / "channel_fuzz.json"
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    fuzz = importlib.import_module("test_isolation").fuzz
    known = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    slices: list[int] = known.get("messages", [])
    while len(slices) * SLICE_S < options.seconds:
        with (
            Path(os.devnull).open("w") as nothing,
            contextlib.redirect_stdout(nothing),
        ):  # what it is told to print
            slices.append(fuzz(SLICE_S, 1000 + len(slices)))
        found = {"seconds": len(slices) * SLICE_S, "sent": sum(slices), "messages": slices}
        write_atomically(options.out, json.dumps({**found, "machine": machine.describe()}, indent=1) + "\n")
        print(f"{found['seconds']:.0f} s, {found['sent']} messages", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
