"""Evidence for rules: one attempt, parsed once into commands, scripts, changes and accesses."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from woodshed.agent.access import path_class
from woodshed.agent.effects import effect
from woodshed.monitors import commands
from woodshed.monitors.commands import Command
from woodshed.monitors.paths import SYSTEM_HOOKS, absolute, looks_like_path
from woodshed.pysource import code, syntax
from woodshed.pysource.code import NewNode, Scan
from woodshed.records import Access, Call, Flag, Observation, PathClass, Rollout, Task, Verdict
from woodshed.tasks import gold_folder, workspace

QUOTE_CHARS = 240
BROKEN = 0.95
"""Confidence of the flag for a rule that failed on an attempt: above any threshold, but not proof. So an attempt gains
nothing from input that a rule cannot read."""


@dataclass(frozen=True)
class FileChange:
    """One file of the patch."""

    path: str
    before: str | None
    """None for a new file, or one that is not text."""
    after: str | None
    """None for a deleted file."""
    is_package: bool
    """Below an allowed path."""
    gold: str = ""
    """The original file, if the task's own solution changes it."""

    @functools.cached_property
    def known(self) -> str:
        """Former text of the file and its original: code in them is no offence."""
        return f"{self.before or ''}\n{self.gold}" if self.gold else self.before or ""

    @functools.cached_property
    def scan(self) -> Scan:
        """New code in the change, if it is Python."""
        if self.after is None or not self.path.endswith((".py", ".pyi")):
            return Scan()
        return code.scan_segments(self.before or "", self.after, self.segments)

    @functools.cached_property
    def segments(self) -> list[code.CodeSegment]:
        """The statements of the file that are new or changed."""
        return code.segments(self.before or "", self.after or "")

    @functools.cached_property
    def added(self) -> list[str]:
        """Lines of the new text that the old one lacks."""
        return [line for segment in self.segments for line in segment.lines]

    @functools.cached_property
    def removed(self) -> list[str]:
        """Lines of the old text that the new one lacks."""
        return [line for segment in self.segments for line in segment.removed_lines]

    def line(self, new_node: NewNode) -> str:
        """The line of the new text on which a node begins."""
        lines = (self.after or "").split("\n")
        return lines[new_node.line - 1].strip() if 0 < new_node.line <= len(lines) else ""


@dataclass(frozen=True)
class Step:
    """One call that was executed or attempted."""

    turn: int
    call: Call
    observation: Observation | None

    @property
    def written(self) -> str:
        """New text that the call puts into a file."""
        return effect(self.call).new


@dataclass(frozen=True)
class Finding:
    """Finding of a rule: a `Flag` without the rule's name."""

    turn: int
    quote: str
    confidence: float


@dataclass(frozen=True)
class Evidence:
    """One attempt as rules see it."""

    task: Task
    rollout: Rollout
    verdict: Verdict | None = None

    @functools.cached_property
    def steps(self) -> list[Step]:
        """Calls in order; those that could not be read are left out."""
        return [
            Step(n, call, next((o for o in turn.observations if o.call_id == call.id), None))
            for n, turn in enumerate(self.rollout.turns)
            for call in turn.calls
            if call.error_kind is None
        ]

    @functools.cached_property
    def commands(self) -> list[tuple[int, Command]]:
        """Every command of every shell call, with its turn."""
        return [
            (step.turn, command)
            for step in self.steps
            for command in commands.parse(effect(step.call).command)
        ]

    @functools.cached_property
    def scripts(self) -> list[tuple[int, str, Scan]]:
        """Python that was run or written outside of the package: turn, text, scan."""
        texts = [(turn, c.code) for turn, c in self.commands if c.code]
        for turn, command in self.commands:
            if command.stdin and any(path.endswith(".py") for path in command.writes):
                texts.append((turn, command.stdin))
        for step in self.steps:
            path = str(step.call.arguments.get("path", ""))
            if step.written and path.endswith(".py") and not self.in_package(path):
                texts.append((step.turn, step.written))
        return [(turn, text, code.scan(text)) for turn, text in texts]

    @functools.cached_property
    def changes(self) -> list[FileChange]:
        """The patch, file by file."""
        root, gold = workspace(self.task), gold_folder(self.task)
        return [
            FileChange(
                path, original_text(root, path), text, self.in_package(path), original_text(gold, path) or ""
            )
            for path, text in self.rollout.patch.files.items()
        ]

    @functools.cached_property
    def package_changes(self) -> list[FileChange]:
        return [change for change in self.changes if change.is_package and change.path.endswith(".py")]

    def in_package(self, path: str) -> bool:
        return self.class_of(path) == "package"

    def class_of(self, path: str) -> PathClass:
        """The class of a path, absolute or relative to the workspace, as in the access log."""
        if path not in self._classes:
            whole = absolute(path)
            self._classes[path] = "hook" if SYSTEM_HOOKS.search(whole) else path_class(whole, self.task)
        return self._classes[path]

    @functools.cached_property
    def _classes(self) -> dict[str, PathClass]:
        return {}

    @functools.cached_property
    def named(self) -> list[tuple[int, str, Command | Step]]:
        """Paths in the arguments of commands and tools: turn, absolute path, command or tool call."""
        paths: list[tuple[int, str, Command | Step]] = []
        for step in self.steps:
            if path := step.call.arguments.get("path"):
                paths.append((step.turn, absolute(str(path)), step))
        for turn, command in self.commands:
            words = [w for w in command.arguments if looks_like_path(w)] if not command.code else []
            paths += [(turn, absolute(word), command) for word in (*words, *command.reads)]
        for turn, text, scan in self.scripts:
            runner = Command(("python",), text=text)
            paths += [(turn, absolute(s), runner) for s, _ in scan.strings if looks_like_path(s)]
        return paths

    @property
    def accesses(self) -> Sequence[Access]:
        return self.rollout.accesses

    def turn_of(self, line: str) -> int:
        """The turn that wrote a line into a file; the last turn if no call shows it."""
        stripped = line.strip()
        last = max(len(self.rollout.turns) - 1, 0)
        if not stripped:
            return last
        for step in self.steps:
            if stripped in step.written or stripped in effect(step.call).command:
                return step.turn
        return last

    def finding_at(self, change: FileChange, new_node: NewNode, confidence: float) -> Finding:
        """A finding in the patch, quoted by its line."""
        line = change.line(new_node)
        return Finding(self.turn_of(line), f"{change.path}:{new_node.line}: {line}"[:QUOTE_CHARS], confidence)

    def unreadable(self, error: str) -> list[Finding]:
        """Finding in place of a rule that failed on this attempt."""
        return [Finding(self.turn_of(""), f"the rule could not read the attempt: {error}", BROKEN)]

    def flag(self, rule: str, finding: Finding) -> Flag:
        quote = finding.quote.strip()[:QUOTE_CHARS]
        return Flag(self.rollout.id, rule, finding.turn, quote, finding.confidence)


@functools.lru_cache(maxsize=512)
def original_text(root: Path, path: str) -> str | None:
    """A file as the task gave it, or None if there was none, or it is not text."""
    file = root / path
    try:
        if file.is_file() and file.resolve().is_relative_to(root.resolve()):
            return syntax.read(path, file.read_bytes())
    except (OSError, ValueError, syntax.UnreadableError):  # not a file name, or not text
        pass
    return None


def is_there(root: Path, path: str) -> bool:
    """True if the task's workspace has this path, which need not be a valid file name."""
    try:
        return (root / path).exists()
    except (OSError, ValueError):
        return False


def reported(findings: Iterator[Finding]) -> Iterator[Finding]:
    """The strongest finding of each turn."""
    best: dict[int, Finding] = {}
    for finding in findings:
        if finding.turn not in best or finding.confidence > best[finding.turn].confidence:
            best[finding.turn] = finding
    yield from (best[turn] for turn in sorted(best))
