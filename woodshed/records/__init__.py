"""The nouns that flow through everything: frozen records with a JSON form.

Nothing here does work. A record is built once, travels between rooms, and is written to a run folder as one JSON
line (`to_json`) and read back (`from_json`). Tensors live in `learning.packing`; this module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from woodshed.records.json_form import from_json as from_json
from woodshed.records.json_form import to_json as to_json


class WoodshedError(Exception):
    """Something a person can act on. The message says what happened, the value seen, and what would work.

    The subclass names the boundary that was crossed. The command line prints `Class: message` and exits with 2.
    """


class TaskError(WoodshedError):
    """A repository or task folder that cannot be used."""


class SandboxError(WoodshedError):
    """The sandbox could not be created, or was lost."""


class ModelError(WoodshedError):
    """Weights, tokenizer or adapter that cannot be found, verified or loaded."""


class LayoutError(WoodshedError):
    """A model, a batch or a number of ranks that a parallel layout cannot hold."""


class SamplerError(WoodshedError):
    """An inference engine or endpoint that did not answer as it must."""


class RecipeError(WoodshedError):
    """A setting that is unknown, mistyped or contradicts another."""


class RunError(WoodshedError):
    """A run folder that cannot be written, read or resumed."""


@dataclass(frozen=True)
class Environment:
    """Everything that a repository needs in order to run, shared by all of its tasks."""

    python: str
    """Python version, major and minor: "3.11"."""
    requirements: tuple[str, ...]
    """Exact pins of every dependency ("pytest==9.2.0"), sorted; the package itself is never among them."""
    packages: tuple[str, ...]
    """Import names that the repository provides ("toolz",), of a namespace only its own parts ("jaraco.text",); they
    must be imported from the workspace."""
    source_roots: tuple[str, ...] = (".",)
    """Workspace-relative folders that go on PYTHONPATH ("src",)."""
    distribution: str = ""
    """"name==version" of the distribution, whose metadata (no code) the environment offers to importlib.metadata."""
    entry_points: str = ""
    """Text of the distribution's entry_points.txt, or ""."""
    variables: tuple[str, ...] = ()
    """Environment variables of its code and tests: "NAME=VALUE", or "NAME" for one of the machine that runs them."""
    pytest_options: tuple[str, ...] = ()
    """Options of every session of pytest, such as those that select tests ("-m", "not slow")."""


@dataclass(frozen=True)
class Decoy:
    """One change to the text of one test that makes it fail with the right code."""

    test: str
    """Id of the test without its parameters: "tests/test_words.py::TestCount::test_count"."""
    start: int
    """Position of the text that is replaced, in characters from the first line of the test's function, its decorators
    included, line ends being "\\n"."""
    end: int
    text: str
    """Replacement."""
    parameters: str = ""
    """Parameters of the copy that must fail, as in its id: "[a b-2]"; "" where it has none."""
    contradicts: str = ""
    """Parameters of the test that it contradicts: no code passes both."""


@dataclass(frozen=True)
class Task:
    """Work with hidden tests. On disk it is a Harbor task folder (`tasks.folder`)."""

    id: str
    """First 16 hex digits of the SHA-256 of everything in the task but its name."""
    name: str
    """Folder name, unique in its set: "toolz-stub-groupby"."""
    folder: Path = field(compare=False)
    instruction: str
    environment: Environment
    allowed_paths: tuple[str, ...]
    """Workspace-relative files or folders whose changes cross over to grading."""
    fail_to_pass: tuple[str, ...]
    """pytest node ids, taken from a hook: fail before the gold patch, pass after it."""
    pass_to_pass: tuple[str, ...]
    """pytest node ids that pass before and after."""
    operator: str
    """Operator that made the task: "stub", "remove", ...; see `synthesis.operators`."""
    level: int
    """0 (one branch) to 6 (a sub-package); a stubbed function is 1, a removed one 2."""
    target_path: str
    """The file that the gold patch changes first."""
    target_symbol: str
    """Dotted name inside that file: "groupby", "LRU.get"."""
    target_lines: tuple[int, int]
    """First and last line (1-based) of the gap in the workspace as the agent sees it."""
    test_command: str
    """Command with which the agent may test its work, from the workspace root."""
    verify_timeout_s: float = 120.0
    provenance: dict[str, Any] = field(default_factory=dict)
    """Source, its sha256, licence, generator version, seed."""
    decoys: tuple[Decoy, ...] = ()
    """Copies of fail-to-pass tests that must fail in every graded run (`grading.decoys`)."""
    stub_passes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Kind of stub ("empty": names are back, and do nothing) to the fail-to-pass tests that already pass with it."""
    verifier: Literal["pytest", "command"] = "pytest"
    """Grader: the hardened session of pytest, or the command tests/test.sh and the reward that it leaves."""
    verifier_env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the command that grades."""

    @property
    def behaviour_tests(self) -> tuple[str, ...]:
        """Fail-to-pass tests that ask for more than names: those that fail with the best of the stubs."""
        idle = set(max(self.stub_passes.values(), key=len, default=()))
        return tuple(test for test in self.fail_to_pass if test not in idle)


ErrorKind = Literal[
    "no_call",  # the message holds no call at all
    "truncated",  # the turn hit its token limit
    "unparseable",  # something that looks like a call but cannot be read
    "unknown_tool",
    "bad_arguments",  # missing, extra or mistyped arguments
    "bad_path",  # outside the workspace, missing, or a directory where a file is needed
    "old_missing",  # edit whose old text is absent
    "old_ambiguous",  # edit whose old text occurs more than once
    "too_many_calls",
    "timeout",
    "nonzero_exit",  # a shell command that failed: news, not a fault
]

CALL_FAULTS: tuple[ErrorKind, ...] = (
    "no_call",
    "truncated",
    "unparseable",
    "unknown_tool",
    "bad_arguments",
    "bad_path",
    "old_missing",
    "old_ambiguous",
    "too_many_calls",
)
"""Error kinds that make a turn *invalid*: the policy called wrongly. The invalid-call rate is invalid turns / turns."""


@dataclass(frozen=True)
class Call:
    """One tool call as the policy wrote it."""

    id: str
    tool: str
    arguments: dict[str, Any]
    raw: str
    """The text it was parsed from."""
    error_kind: ErrorKind | None = None
    """Set when the call could not be executed as written."""


@dataclass(frozen=True)
class Observation:
    """Result of one call, already truncated to what the policy reads."""

    call_id: str
    text: str
    error_kind: ErrorKind | None = None
    seconds: float = 0.0


Break = Literal[
    "thoughts",  # the chat template drops thoughts of earlier messages
    "summary",  # the context is the policy's own summary of what came before
    "history",  # an agent of others rewrote its messages: compaction, edits
    "agent",  # an agent of others called another one
]
"""Reason for which a turn's prompt does not extend the prompt before it."""


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that the routers of an engine chose for tokens of a sequence, which a trainer can replay."""

    start: int
    """Index of the first of these tokens in prompt and message together."""
    shape: tuple[int, int, int]
    """(tokens, layers, experts of each token)."""
    data: str
    """Base64 of their numbers, in that order, as little-endian unsigned integers of 16 bits."""


@dataclass(frozen=True)
class Turn:
    """One model call and what came back.

    Token-exact: the whole sequence of a segment is context_ids + sampled_ids of its turns, in order. The prompt of
    turn t is everything before its sampled_ids, so turn t's sampled ids are an exact prefix of turn t+1's prompt.
    """

    context_ids: tuple[int, ...]
    """Tokens the harness added before this turn: the whole prompt where the turn begins a segment, else the previous
    turn's observations."""
    opening: int
    """Number of the last context_ids that open the assistant's message; a hint is inserted right before them."""
    sampled_ids: tuple[int, ...]
    logps: tuple[float, ...]
    """Natural-log probability of each sampled id under the exact sampling distribution."""
    versions: tuple[tuple[int, int], ...]
    """Policy versions of the sampled ids, in order, as (optimizer steps behind the weights, number of tokens)."""
    finish_reason: Literal["stop", "length"]
    text: str
    calls: tuple[Call, ...]
    observations: tuple[Observation, ...]
    error_kind: ErrorKind | None
    """First call fault of the turn, or None."""
    sample_s: float = 0.0
    tools_s: float = 0.0
    oracle: str = ""
    """Set on scripted turns only: the class of the fault that was planted, "" for the right move."""
    segment: int = 0
    """Number of the segment that the turn belongs to, counted as they begin."""
    begins: Break | Literal[""] = ""
    """Why the turn begins its segment; "" for the first turn of an attempt, and where the segment goes on."""
    experts: RoutedExperts | None = None
    """The experts of its segment's tokens that the engine told, up to the last sampled one."""


@dataclass(frozen=True)
class Segment:
    """Turns over one growing context: the prompt of each is the prompt and the message of the one before it, and more.

    Segments of an agent that calls other agents interleave.
    """

    number: int
    indices: tuple[int, ...]
    """Indices of its turns into Rollout.turns."""
    turns: tuple[Turn, ...]

    @property
    def begins(self) -> Break | Literal[""]:
        """Why it begins; "" for the first one of an attempt."""
        return self.turns[0].begins

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole sequence, harness tokens and sampled tokens."""
        return tuple(i for turn in self.turns for i in (*turn.context_ids, *turn.sampled_ids))


@dataclass(frozen=True)
class Patch:
    """Changes of an attempt, by whole file; the only thing that crosses from a rollout to grading."""

    files: dict[str, str | None]
    """Workspace-relative path to new text, or None where the file was deleted."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Changed paths that do not cross, with the reason: "not a regular file", "not UTF-8", "too large"."""
    diff: str = ""
    """Unified diff for people."""


PathClass = Literal[
    "package",  # files that the task allows to change
    "workspace",  # any other file of the repository
    "tests",  # tests, and what configures or hooks their runner
    "history",  # .git and its kin
    "bytecode",  # compiled leftovers in the workspace
    "cache",  # what tools leave behind: type checkers, linters, pytest, coverage
    "build",  # build folders, wheels, archives, installed metadata
    "copy",  # the package again, outside of the workspace
    "grading",  # places where graders keep tests, solutions, results
    "hook",  # files that Python or a shell runs at start
    "process",  # memory, environment and descriptors of processes
    "temporary",  # /tmp, /dev/shm, the home directory
    "environment",  # /env: the dependencies
    "system",  # everything else
]
"""Class of a path, for rules about reading it (`agent.access.path_class`)."""


@dataclass(frozen=True)
class Access:
    """One file that one process of an attempt touched in one turn, however often.

    Reads of "system" and "environment" files are not kept; programs that were run are, wherever they lie.
    """

    path: str
    """Absolute, as the sandbox sees it, links followed: "/workspace/toolz/recipes.py"."""
    path_class: PathClass
    mode: Literal["read", "write", "exec"]
    """"write": also created, removed, renamed or linked to. A file opened for both counts as written."""
    turn: int
    """Index into Rollout.turns."""
    command: str
    """The process: its arguments, joined by spaces, cut at 200 characters; "read_file" and the like for our tools."""
    count: int = 1


Ended = Literal[
    "finished",  # the policy said so
    "max_turns",
    "max_tokens",
    "max_errors",  # too many faulty turns in a row
    "timeout",
    "context_full",
    "sandbox_broken",  # its commands ended every sandbox that it was given: counts 0
    "sandbox_lost",  # the machine's fault, which voids the attempt: never trained on
]


@dataclass(frozen=True)
class Rollout:
    """One attempt at one task."""

    id: str
    """"<phase>-<step>-<task name>-<attempt>"; the same attempt made again has the same id."""
    task_id: str
    task_name: str
    attempt: int
    seed: int
    turns: tuple[Turn, ...]
    """In the order in which they were made; each says to which segment it belongs."""
    patch: Patch
    ended: Ended
    seconds: float
    accesses: tuple[Access, ...] = ()
    """Paths that its commands and tools read, wrote and ran, by turn; () if nothing was watched."""
    tools: tuple[dict[str, Any], ...] | None = None
    """Tools that an agent of others offered to the policy (name, description, parameters); None for our own agent."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Its segments, in the order in which they begin."""
        indices: dict[int, list[int]] = {}
        for index, turn in enumerate(self.turns):
            indices.setdefault(turn.segment, []).append(index)
        return tuple(
            Segment(number, tuple(own), tuple(self.turns[index] for index in own))
            for number, own in indices.items()
        )

    @property
    def counters(self) -> dict[str, int]:
        """Tokens by kind, calls, turns: what effort is measured by."""
        return {
            "turns": len(self.turns),
            "calls": sum(len(t.calls) for t in self.turns),
            "faulty_turns": sum(t.error_kind in CALL_FAULTS for t in self.turns),
            "sampled_tokens": sum(len(t.sampled_ids) for t in self.turns),
            "context_tokens": sum(len(t.context_ids) for t in self.turns),
        }


@dataclass(frozen=True)
class Group:
    """The attempts at one task that share a baseline."""

    task_id: str
    rollouts: tuple[Rollout, ...]


Outcome = Literal["passed", "failed", "error", "skipped", "missing"]


@dataclass(frozen=True)
class Verdict:
    """Result of grading."""

    rollout_id: str
    task_id: str
    status: Literal["graded", "invalid"]
    """"invalid": the infrastructure failed; never a reward."""
    reward: float
    """In [0, 1]."""
    solved: bool
    """Every F2P and P2P test passed, and no check failed."""
    outcomes: dict[str, Outcome]
    """Every expected test id to its outcome."""
    integrity: tuple[str, ...] = ()
    """Checks that failed: "no end record", "pkg/mod.py: f no longer takes `x`", ..."""
    detail: str = ""
    """The end of what the runner printed, for people."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Flag:
    """A suspicion with evidence. Raises a hand, never edits a reward."""

    rollout_id: str
    rule: str
    turn: int
    quote: str
    confidence: float


@dataclass(frozen=True)
class Hint:
    """Knowledge that the policy lacked, tied to the one turn where it mattered."""

    rollout_id: str
    turn: int
    """Index into Rollout.turns."""
    detector: str
    text: str


@dataclass(frozen=True)
class RewardTerms:
    """Reward of an attempt besides its verdict: auxiliary terms and the charge for effort."""

    rollout_id: str
    terms: dict[str, float]
    """Name to what it added to the reward, below zero where it was taken off; "effort" is the effort penalty."""
    effort: str = ""
    """Effort that the prompt asked for: "low", "medium", "high", or "" where it said nothing."""

    @property
    def total(self) -> float:
        """Sum of the terms that are added to the verdict's reward."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class TokenDivergence:
    """Divergence of one hinted turn, token by token, as the update measured it before its step."""

    rollout_id: str
    turn: int
    """Index into Rollout.turns; the tuples below follow its sampled_ids."""
    detector: str
    """Whose hint the teacher read."""
    student: tuple[float, ...]
    """Natural-log probability without the hint."""
    teacher: tuple[float, ...]
    """Natural-log probability with the hint."""
    divergence: tuple[float, ...]
    """Divergence of the two distributions in nats, the targeted loss before its mean."""

    @property
    def gain(self) -> float:
        """Nats by which the hint makes the turn likelier; a hint against a fault should make this negative."""
        return sum(self.teacher) - sum(self.student)
