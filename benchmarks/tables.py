"""Fills the marked blocks of README.md and docs/results.md from the files in benchmarks/results.

    python benchmarks/tables.py            writes both documents anew
    python benchmarks/tables.py --check    writes nothing; exits with 1 where a document and the files differ

A block begins with `<!-- table: NAME -->` or, in a line, `<!-- figure: NAME -->`, and ends with `<!-- end -->`. NAME
is one of `published.BLOCKS`, which makes the text from JSON. Outside of blocks these two documents hold no measured
figure: `stray_figures` finds them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import published

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "results.md")
BLOCK = re.compile(r"<!-- (table|figure): ([\w-]+) -->(.*?)<!-- end -->", re.S)
MARK = re.compile(r"<!-- (?:(?:table|figure): [\w-]*|end) -->")
UNIT = (
    r"%|percent|pp|points|times|x\b|fold|tok/s|tokens/s|tokens a second|tokens per second|ms|us|s\b|sec\b|seconds?|"
    r"min\b|minutes?|hours?|[kMGT]i?B|nats?"
)
FIGURE = re.compile(rf"(?<![\w.`])(?<!\w-)\d[\d.,]*(?: (?:to|and|or) \d[\d.,]*)?[ -]?(?:{UNIT})(?![\w])")
LEVEL = re.compile(r"95 ?% intervals?")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.S | re.M)


class BlockError(ValueError):
    """A block that is not closed, stands in another, or is named wrongly."""


def fill(text: str, blocks: Mapping[str, Callable[[], str]] = published.BLOCKS) -> str:
    """The document with every block made anew.

    Raises:
        BlockError: a mark without its other half, or a name that nobody makes.
    """
    if left := MARK.findall(BLOCK.sub("", text)):
        raise BlockError(f"{left[0]} has no other half")

    def made(found: re.Match[str]) -> str:
        kind, name, inside = found.groups()
        if MARK.search(inside):
            raise BlockError(f"the {kind} {name!r} is not closed before the next one")
        if name not in blocks:
            raise BlockError(f"nobody makes the {kind} {name!r}; there are {', '.join(sorted(blocks))}")
        content = blocks[name]()
        around = "\n" if kind == "table" else ""
        return f"<!-- {kind}: {name} -->{around}{content}{around}<!-- end -->"

    return BLOCK.sub(made, text)


def stray_figures(text: str) -> list[str]:
    """Measured figures that no block made: numbers with a unit, outside of code."""
    return [found.group() for found in FIGURE.finditer(LEVEL.sub("", CODE.sub("", BLOCK.sub("", text))))]


def main() -> None:
    """Write the documents, or say which of them are not what the files say."""
    parser = argparse.ArgumentParser(description="Fill the tables of README.md and docs/results.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where one differs")
    options = parser.parse_args()
    differ = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        try:
            now = fill(text)
        except BlockError as error:
            sys.exit(f"{path.relative_to(ROOT)}: {error}")
        if now != text:
            differ.append(str(path.relative_to(ROOT)))
        if now != text and not options.check:
            path.write_text(now, encoding="utf-8")
    for name in differ:
        print(f"{name}: {'differs from benchmarks/results' if options.check else 'written'}")
    if differ and options.check:
        sys.exit("run: python benchmarks/tables.py")


if __name__ == "__main__":
    main()
