"""Trajectory viewer in a terminal, like the browser of rollouts on the page; it works over ssh.

Rollouts are loaded batch by batch in the background, so the first can be read at once however big the run is. Text from
the run is shown as plain text: markup is not interpreted, escape sequences are made visible.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from woodshed.evals.measures import Graded, is_fault
from woodshed.records import Flag, Hint, Rollout, RunError, TokenDivergence, Verdict
from woodshed.report.gather import result_of
from woodshed.report.turn_text import MODES, SIGNS, RolloutRecords, RolloutRow, end_text, head_text, turn_text
from woodshed.report.visible import visible
from woodshed.runs.folder import BatchId, Kind, RunDir

UNREADABLE = (ValueError, KeyError, TypeError, RunError)  # a batch that is damaged, or of another version
HELP = "is:solved has:hint reward:>0.5 task: fault: hint: flag: phase: step: ended:, or text of a name"


class Reader:
    """A run folder, read on demand."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._lock = threading.Lock()  # the list is read in a thread, beside what is on the screen
        self._batches = functools.lru_cache(maxsize=4)(self._batch)
        self._texts = functools.lru_cache(maxsize=8)(self._token_texts)

    def batch(self, batch_id: BatchId) -> list[RolloutRecords]:
        """Every rollout of a batch."""
        with self._lock:
            return self._batches(batch_id)

    def token_texts(self, batch_id: BatchId) -> dict[int, str]:
        """Texts of the tokens that a batch sampled; those of the whole run if the batch kept none."""
        with self._lock:
            return self._texts(batch_id)

    def instruction(self, task: str) -> str:
        """Instruction of a task of this run; "" if the run does not hold it."""
        for path in sorted((self.run.path / "tasks").glob("*/*/instruction.md")):
            if path.parent.name == task:
                return path.read_text(encoding="utf-8", errors="replace")
        return ""

    def rows(self, batch_id: BatchId) -> list[RolloutRow]:
        return [_row(batch_id, index, records) for index, records in enumerate(self.batch(batch_id))]

    def _batch(self, batch_id: BatchId) -> list[RolloutRecords]:
        phase, step, part = batch_id
        rollouts = self.run.find("rollouts", Rollout, phase, step, part=part) or []
        verdict_of = {
            v.rollout_id: v for v in self.run.find("verdicts", Verdict, phase, step, part=part) or []
        }
        hints: dict[str, dict[int, list[Hint]]] = {}
        for hint in self._of_step("hints", Hint, batch_id):
            hints.setdefault(hint.rollout_id, {}).setdefault(hint.turn, []).append(hint)
        token_divergences: dict[str, dict[int, TokenDivergence]] = {}
        for divergence in self._of_step("divergences", TokenDivergence, batch_id):
            token_divergences.setdefault(divergence.rollout_id, {})[divergence.turn] = divergence
        flags: dict[str, list[Flag]] = {}
        for flag in self._of_step("flags", Flag, batch_id):
            flags.setdefault(flag.rollout_id, []).append(flag)
        return [
            RolloutRecords(
                r,
                verdict_of.get(r.id),
                hints.get(r.id, {}),
                token_divergences.get(r.id, {}),
                flags.get(r.id, ()),
            )
            for r in rollouts
        ]

    def _of_step(self, kind: Kind, record: type[Any], batch_id: BatchId) -> Iterable[Any]:
        for phase, step, part in self.run.batches(kind):
            if (phase, step) == batch_id[:2]:
                yield from self.run.find(kind, record, phase, step, part=part) or ()

    def _token_texts(self, batch_id: BatchId) -> dict[int, str]:
        phase, step, part = batch_id
        lines = self.run.find("token_texts", dict, phase, step, part=part)
        if lines is None:
            lines = [record for _, _, record in self.run.scan("token_texts")]
        return {int(i): text for record in lines for i, text in record.items()}


def _row(batch_id: BatchId, index: int, records: RolloutRecords) -> RolloutRow:
    rollout = records.rollout
    return RolloutRow(
        batch_id,
        index,
        rollout.id,
        rollout.task_name,
        rollout.attempt,
        rollout.ended,
        result_of(Graded(rollout, records.verdict)),
        len(rollout.turns),
        tuple(str(turn.error_kind) for turn in rollout.turns if is_fault(turn)),
        tuple(hint.detector for hints in records.hints.values() for hint in hints),
        (*(flag.rule for flag in records.flags), *(records.verdict.integrity if records.verdict else ())),
        len(records.token_divergences),
        None if records.verdict is None else records.verdict.reward,
        rollout.counters["sampled_tokens"],
    )


IS: Mapping[str, Callable[[RolloutRow], bool]] = {
    "solved": lambda row: row.result == "solved",
    "partly": lambda row: row.result == "partly",
    "failed": lambda row: row.result == "failed",
    "void": lambda row: row.result == "void",
    "flagged": lambda row: bool(row.flags),
    "flag": lambda row: bool(row.flags),
    "hinted": lambda row: bool(row.hints),
    "hint": lambda row: bool(row.hints),
    "faulty": lambda row: bool(row.faults),
    "fault": lambda row: bool(row.faults),
    "targeted": lambda row: row.targeted > 0,
}
NUMBER = re.compile(r"(?P<sign><=|>=|<|>|=)?(?P<number>[0-9]*\.?[0-9]+)")
SIGNED = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}


def _compares(figure: float | None, value: str) -> bool:
    """True if a number is as a filter wants it: "0.5", ">0.5", "<=3"."""
    found = NUMBER.fullmatch(value)
    return (
        found is not None
        and figure is not None
        and SIGNED[found["sign"] or "="](figure, float(found["number"]))
    )


KEYS: Mapping[str, Callable[[RolloutRow, str], bool]] = {
    "is": lambda row, value: value in IS and IS[value](row),
    "has": lambda row, value: value in IS and IS[value](row),
    "reward": lambda row, value: _compares(row.reward, value),
    "turns": lambda row, value: _compares(row.num_turns, value),
    "tokens": lambda row, value: _compares(row.num_tokens, value),
    "phase": lambda row, value: row.batch_id[0].lower() == value,
    "step": lambda row, value: str(row.batch_id[1]) == value,
    "task": lambda row, value: value in row.task.lower(),
    "fault": lambda row, value: any(value in kind.lower() for kind in row.faults),
    "hint": lambda row, value: any(value in detector.lower() for detector in row.hints),
    "flag": lambda row, value: any(value in rule.lower() for rule in row.flags),
    "ended": lambda row, value: value in row.ended,
}
COMPARED = ("reward", "turns", "tokens")
"""Filters that take a number."""


def matches(row: RolloutRow, query: str) -> bool:
    """True if a row passes every part of a query: key:value, or text that it contains."""
    for part in query.lower().split():
        key, colon, value = part.partition(":")
        if colon and key in KEYS:
            if value and not KEYS[key](row, value):
                return False
        elif part not in row.text:
            return False
    return True


def texts(query: str) -> list[str]:
    """The parts of a query that are searched as text."""
    return [part for part in query.lower().split() if part.partition(":")[0] not in KEYS or ":" not in part]


def unknown(query: str) -> str:
    """The first part of a query that no filter knows, and what they know; "" if there is none."""
    for part in query.lower().split():
        key, colon, value = part.partition(":")
        if not colon or not value:
            continue
        if key in ("is", "has") and value not in IS:
            return f"{part}: {key}: takes {', '.join(IS)}"
        if key in COMPARED and not NUMBER.fullmatch(value):
            return f"{part}: {key}: takes a number, as in {key}:>0.5"
        if key.isalpha() and key not in KEYS:
            return f"{key}: is no filter, so {part} is searched as text; filters are {', '.join(KEYS)}"
    return ""


ORDERS: Mapping[str, Callable[[RolloutRow], Any]] = {
    "in order": lambda row: 0,
    "most reward first": lambda row: math.inf if row.reward is None else -row.reward,
    "least reward first": lambda row: math.inf if row.reward is None else row.reward,
    "most faults first": lambda row: -len(row.faults),
    "most tokens first": lambda row: -row.num_tokens,
}
"""Name of an order of the list to its key."""


# -- the screen --------------------------------------------------------------------------------------------------------


KEY_HELP = """\
j k  next, previous turn
n p  next, previous rollout
h H  next, previous turn with a hint
f F  next, previous turn with a fault
t    next turn that the hint's teacher read
c    what the colours of tokens mean: log-prob, hint, divergence, none
o    order of the list: as they came, by reward, faults, tokens
/    search: is:solved has:hint task:NAME fault:KIND reward:>0.5, or text
d    day and night
q    quit"""


def marked(text: Text, found: Sequence[str]) -> Text:
    """A text in which what was searched stands out."""
    if found:
        text.highlight_words(found, "black on yellow", case_sensitive=False)
    return text


def _beginning(name: str, width: int = 24) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}\u2026"


class Viewer(App[None]):
    """List of rollouts on the left, one transcript on the right."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #finder { width: 50; } #list { height: 1fr; } #transcript { padding: 0 1; border-left: solid $surface-lighten-2; }
    .turn { margin-top: 1; border-left: blank; padding-left: 1; } .turn.current { border-left: thick $accent; }
    #status { height: 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "turn(1)", "turn"),
        Binding("k", "turn(-1)", "back", show=False),
        Binding("n", "rollout(1)", "rollout"),
        Binding("p", "rollout(-1)", "back", show=False),
        Binding("h", "seek('hint', 1)", "hint"),
        Binding("H", "seek('hint', -1)", "back", show=False),
        Binding("f", "seek('fault', 1)", "fault"),
        Binding("F", "seek('fault', -1)", "back", show=False),
        Binding("t", "seek('targeted', 1)", "targeted"),
        Binding("c", "colour", "colours"),
        Binding("o", "order", "order"),
        Binding("slash", "search", "search"),
        Binding("d", "night", "day/night"),
        Binding("question_mark", "keys", "keys", key_display="?"),
        Binding("escape", "leave", show=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.title = f"Woodshed: {visible(reader.run.path.name)}"
        self.reader = reader
        self.rows: list[RolloutRow] = []
        self.shown: list[RolloutRow] = []
        self.records: RolloutRecords | None = None
        self.opened: RolloutRow | None = None
        self.turn = 0
        self.mode = MODES[0]
        self.num_unreadable = 0
        self.order = "in order"

    def compose(self) -> ComposeResult:
        with Horizontal():
            with Vertical(id="finder"):
                yield Input(placeholder=HELP, id="query", compact=True)
                yield DataTable(id="list", cursor_type="row", show_header=False)
                yield Static(id="status", markup=False)
            yield VerticalScroll(id="transcript")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).add_columns("", "task", "where", "marks")
        self.query_one(DataTable).focus()
        self.load()

    @work(thread=True, exclusive=True)
    def load(self) -> None:
        """Read the run in the background, batch by batch."""
        batches = self.reader.run.batches("rollouts")
        for number, batch_id in enumerate(batches, 1):
            try:
                rows = self.reader.rows(batch_id)
            except UNREADABLE:
                self.num_unreadable += 1
                rows = []
            if not self.is_running:
                return
            self.call_from_thread(self.extend, rows, number, len(batches))

    def extend(self, rows: Sequence[RolloutRow], done: int, total: int) -> None:
        """More rows, read from one more batch."""
        self.rows += rows
        query = self.query_one(Input).value
        if self.order == "in order":
            self.list_rows([row for row in rows if matches(row, query)])
        else:
            self.list_anew()
        more = "" if done == total else f", reading {done} of {total} batches"
        more += f", {self.num_unreadable} batches cannot be read" if self.num_unreadable else ""
        self.say_count(more)

    def list_anew(self) -> None:
        """The list by the present query and order."""
        query = self.query_one(Input).value
        self.query_one(DataTable).clear()
        self.shown = []
        self.list_rows(sorted((row for row in self.rows if matches(row, query)), key=ORDERS[self.order]))

    def say_count(self, more: str = "") -> None:
        query = unknown(self.query_one(Input).value)
        said = f"{len(self.shown)} of {len(self.rows)} rollouts{more}"
        self.query_one("#status", Static).update(visible(f"{said}. {query}" if query else said))

    def list_rows(self, rows: Iterable[RolloutRow]) -> None:
        table = self.query_one(DataTable)
        for row in rows:
            self.shown.append(row)
            counts = {"fault": len(row.faults), "hint": len(row.hints), "flag": len(row.flags)}
            marks = [f"{n} {what}{'s' if n > 1 else ''}" for what, n in counts.items() if n]
            step = f"{row.batch_id[0]} {row.batch_id[1]} #{row.attempt}"
            if row.result == "partly":
                marks.insert(0, f"{row.reward:.2f}")
            sign = SIGNS[row.result] + ("\u2691" if row.flags else "")
            cells = (sign, _beginning(row.task), step, ", ".join(marks))
            table.add_row(*(Text(visible(cell)) for cell in cells), key=str(len(self.shown) - 1))

    def on_input_changed(self) -> None:
        self.list_anew()
        self.say_count()

    def on_input_submitted(self) -> None:
        self.action_leave()
        self.draw()  # marks what was searched

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if 0 <= event.cursor_row < len(self.shown) and self.shown[event.cursor_row] is not self.opened:
            self.open(self.shown[event.cursor_row])

    def open(self, row: RolloutRow, turn: int = 0) -> None:
        """Show a rollout."""
        if row is self.opened:
            self.mark(turn)
            return
        self.opened, self.turn = row, turn
        self.records = self.reader.batch(row.batch_id)[row.index]
        self.draw()

    @work(exclusive=True, group="draw")
    async def draw(self) -> None:
        records, row = self.records, self.opened
        if records is None or row is None:
            return
        token_texts = self.reader.token_texts(row.batch_id)
        found = texts(self.query_one(Input).value)
        turns = [
            Static(
                marked(turn_text(n, turn, records, token_texts, self.mode), found),
                classes="turn",
                id=f"turn-{n}",
            )
            for n, turn in enumerate(records.rollout.turns)
        ]
        reader = self.query_one("#transcript", VerticalScroll)
        await reader.remove_children()
        head = head_text(records, row, self.reader.instruction(row.task))
        await reader.mount(
            Static(marked(head, found)), *turns, Static(marked(end_text(records), found), classes="turn")
        )
        self.mark(self.turn)

    def mark(self, number: int) -> None:
        """Make a turn the current one and bring it into view."""
        marked = list(self.query(".turn.current"))
        for node in marked:
            node.remove_class("current")
        node = next(iter(self.query(f"#turn-{number}")), None)
        if node is not None:
            self.turn = number
            node.add_class("current")
            self.query_one("#transcript", VerticalScroll).scroll_to_widget(
                node, animate=False, top=number > 0
            )

    # keys

    def action_turn(self, by: int) -> None:
        if self.records and 0 <= self.turn + by < len(self.records.rollout.turns):
            self.mark(self.turn + by)

    def action_rollout(self, by: int) -> None:
        table = self.query_one(DataTable)
        table.move_cursor(row=table.cursor_row + by)

    def action_seek(self, kind: str, by: int) -> None:
        """Go to the next turn with a hint (or a fault, or a targeted turn), in this rollout or the next that has
        one."""
        if self.records is None or self.opened is None:
            return
        turns = self.turns_with(kind, self.records)
        ahead = [t for t in turns if (t - self.turn) * by > 0]
        if ahead:
            self.mark(ahead[0] if by > 0 else ahead[-1])
            return
        start = self.shown.index(self.opened) if self.opened in self.shown else -1
        for position in range(start + by, len(self.shown) if by > 0 else -1, by):
            row = self.shown[position]
            if IS[kind](row):
                self.open(row, self.turns_with(kind, self.reader.batch(row.batch_id)[row.index])[0])
                self.query_one(DataTable).move_cursor(row=position)
                return

    @staticmethod
    def turns_with(kind: str, records: RolloutRecords) -> list[int]:
        if kind == "fault":
            return [n for n, turn in enumerate(records.rollout.turns) if is_fault(turn)]
        return sorted(records.hints if kind == "hint" else records.token_divergences)

    def action_colour(self) -> None:
        self.mode = MODES[(MODES.index(self.mode) + 1) % len(MODES)]
        self.query_one("#status", Static).update(f"colours: {self.mode}")
        self.draw()

    def action_order(self) -> None:
        names = list(ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self.list_anew()
        self.say_count(f", {self.order}")

    def action_keys(self) -> None:
        self.notify(KEY_HELP, title="keys", markup=False)

    def action_search(self) -> None:
        self.query_one(Input).focus()

    def action_leave(self) -> None:
        self.query_one(DataTable).focus()

    def action_night(self) -> None:
        self.theme = "textual-light" if self.theme == "textual-dark" else "textual-dark"


def view(run: RunDir) -> None:
    """Show a run until the person leaves. Batches that cannot be read are left out and counted.

    Raises:
        RunError: there is nothing to show, or another version wrote it.
    """
    reader, contents = Reader(run), "no finished rollouts yet"
    for batch_id in run.batches("rollouts"):
        try:
            if reader.batch(batch_id):
                return Viewer(reader).run()
        except UNREADABLE as error:
            contents = f"no rollouts that can be read ({error})"
    raise RunError(f"{run.path} holds {contents}; `woodshed report {run.path}` shows the rest")
