"""A task of another format, read: what every reader of a format makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from woodshed.records import Environment, Task


@dataclass(frozen=True)
class ForeignTask:
    """A task of another format, read. Files are bytes by workspace-relative path."""

    name: str
    """Letters, digits, ".", "_" and "-", unique in its set."""
    instruction: str
    environment: Environment
    workspace: Mapping[str, bytes]
    """The repository as the agent sees it, with the gap in it."""
    tests: Mapping[str, bytes]
    """Original test and configuration files that the workspace does not show, or shows otherwise."""
    gold: Mapping[str, bytes | None]
    """Whole files of the gold patch; None for one that it deletes. Empty where `solution` makes them."""
    fail_to_pass: tuple[str, ...] = ()
    """pytest node ids that fail before the gold patch and pass after it; none where a command grades."""
    pass_to_pass: tuple[str, ...] = ()
    """pytest node ids that pass before and after."""
    allowed_paths: tuple[str, ...] = ()
    """Files or folders whose changes cross over to grading; empty takes the files of the gold patch."""
    test_command: str = "python -m pytest -q"
    command_tests: Mapping[str, bytes] = field(default_factory=dict)
    """Files of tests/ where a command grades, test.sh among them; empty where pytest does."""
    verify_timeout_s: float = 120.0
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command that grades."""
    solution: Mapping[str, bytes] = field(default_factory=dict)
    """Files of a folder whose solve.sh, run in a sandbox, makes those of the gold patch."""

    def record(self) -> Task:
        """The task without its id and folder, which `folder.write` fills in."""
        target = next(iter(self.gold), "")
        return Task(
            id="",
            name=self.name,
            folder=Path(),
            instruction=self.instruction,
            environment=self.environment,
            allowed_paths=self.allowed_paths or tuple(self.gold),
            fail_to_pass=self.fail_to_pass,
            pass_to_pass=self.pass_to_pass,
            operator="foreign",
            level=2,
            target_path=target,
            target_symbol="",
            target_lines=(1, 1 + self.workspace.get(target, b"").count(b"\n")),
            test_command=self.test_command,
            verify_timeout_s=self.verify_timeout_s,
            verifier="command" if self.command_tests else "pytest",
            verifier_env=dict(self.verifier_env),
        )
