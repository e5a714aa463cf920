"""Texts of the terminal view: one rollout, its turns and its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from woodshed.agent.effects import Effect, effect
from woodshed.records import Flag, Hint, Rollout, TokenDivergence, Turn, Verdict
from woodshed.report.transcripts import level, segment_note, texts_of_tokens, written_by
from woodshed.report.visible import visible
from woodshed.runs.folder import BatchId

SIGNS = {"solved": "\u2713", "partly": "\u25d0", "failed": "\u2717", "void": "\u2013", "not judged": "?"}
MODES = ("log-prob", "hint", "divergence", "none")


@dataclass(frozen=True)
class RolloutRow:
    """One rollout in the list."""

    batch_id: BatchId
    index: int
    """Its index in the batch."""
    id: str
    task: str
    attempt: int
    ended: str
    result: str
    num_turns: int
    faults: tuple[str, ...]
    hints: tuple[str, ...]
    flags: tuple[str, ...]
    targeted: int
    reward: float | None
    """None until it is graded."""
    num_tokens: int

    @property
    def text(self) -> str:
        return " ".join([self.id, self.result, self.ended, *self.faults, *self.hints, *self.flags]).lower()


@dataclass(frozen=True)
class RolloutRecords:
    """One rollout with its verdict, hints, divergences and flags."""

    rollout: Rollout
    verdict: Verdict | None
    hints: Mapping[int, Sequence[Hint]]
    token_divergences: Mapping[int, TokenDivergence]
    flags: Sequence[Flag]


def turn_text(
    number: int, turn: Turn, records: RolloutRecords, token_texts: Mapping[int, str], mode: str
) -> Text:
    """One turn: its head, hints, flags, the message in colours, edits and observations."""
    note = segment_note(records.rollout, number)
    head = Text(f"\u2500\u2500 {visible(note)}\n" if note else "", "dodger_blue2").append(
        f"turn {number}", "bold"
    )
    if turn.error_kind:
        head.append(f"  \u26a0 {visible(turn.error_kind)}", "bold dark_orange3")
    mean = f", mean log-prob {sum(turn.logps) / len(turn.logps):.2f}" if turn.logps else ""
    head.append(f"  {len(turn.sampled_ids)} tokens{mean}, policy {written_by(turn)}", "dim")
    parts = [head]
    for hint in records.hints.get(number, ()):
        title = f"\u2502 hint, {visible(hint.detector)}, written afterwards (the model did not see it): "
        parts.append(Text(f"{title}{visible(hint.text)}", "medium_purple3"))
    for flag in records.flags:
        if flag.turn == number:
            parts.append(Text(f"\u2691 {visible(flag.rule)}: {visible(flag.quote)}", "bold dark_orange3"))
    divergence = records.token_divergences.get(number)
    if divergence:
        change = f"{'more' if divergence.gain > 0 else 'less'} likely by {abs(divergence.gain):.2f} nats"
        sums = f"log-prob {sum(divergence.student):.2f} without it, {sum(divergence.teacher):.2f} with it"
        parts.append(Text(f"\u2502 the hint makes this message {change}: {sums}", "medium_purple3"))
    parts.append(message_text(turn, divergence, token_texts, mode))
    changes = (effect(call) for call in turn.calls if call.error_kind is None)
    parts += [_edit(change) for change in changes if change.kind == "write"]
    parts += [
        Text(visible(observation.text), "dim" if observation.error_kind is None else "dark_orange3")
        for observation in turn.observations
    ]
    return Text("\n").join(parts)


def message_text(
    turn: Turn, divergence: TokenDivergence | None, token_texts: Mapping[int, str], mode: str
) -> Text:
    """The message with a shade behind every token that this mode colours."""
    texts = texts_of_tokens(turn, token_texts)
    shades = _shades(turn, divergence, mode)
    if texts is None or not shades:
        return Text(visible(turn.text))
    text = Text()
    for part, shade in zip(texts, shades, strict=True):
        text.append(visible(part), shade)
    return text


def _shades(turn: Turn, divergence: TokenDivergence | None, mode: str) -> list[str]:
    """A style per token. Shades are backgrounds of two hues that colour-blind people tell apart."""
    if mode == "log-prob":
        return [_shade((150, 100, 0), share) for share in level(turn.logps) / 45.0]
    if divergence is None or mode == "none" or len(divergence.student) != len(turn.sampled_ids):
        return []
    if mode == "divergence":
        return [_shade((110, 70, 160), share) for share in level(divergence.divergence) / 28.0]
    changes = [after - before for before, after in zip(divergence.student, divergence.teacher, strict=True)]
    hues = [(0, 90, 150) if change > 0 else (170, 75, 0) for change in changes]
    return [_shade(hue, share) for hue, share in zip(hues, level(changes) / 35.0, strict=True)]


def _shade(hue: tuple[int, int, int], share: float) -> str:
    if share < 0.12:
        return ""
    red, green, blue = (round(channel * min(share, 1.0)) for channel in hue)
    return f"white on rgb({red},{green},{blue})"


def _edit(change: Effect) -> Text:
    text = Text(f"edit {visible(change.path)}", "dim")
    for lines, sign, style in ((change.old, "-", "dark_orange3"), (change.new, "+", "dodger_blue2")):
        for line in lines.splitlines():
            text.append(f"\n{sign}{visible(line)}", style)
    return text


def head_text(records: RolloutRecords, row: RolloutRow, instruction: str = "") -> Text:
    """Text above the turns: result, end, flags, instruction."""
    text = Text(visible(row.id), "bold")
    reward = "" if records.verdict is None else f", reward {records.verdict.reward:.2f}"
    text.append(
        f"\n{SIGNS[row.result]} {row.result}{reward}, {visible(row.ended)} after {row.num_turns} turns", "dim"
    )
    for flag in row.flags:
        text.append(f"\n\u2691 {visible(flag)}", "bold dark_orange3")
    if instruction:
        text.append("\nTask", "bold").append(f"\n{visible(instruction.strip())}")
    return text


def end_text(records: RolloutRecords) -> Text:
    """Text below the turns: the patch and the tests that did not pass."""
    parts = []
    if records.rollout.patch.diff:
        parts += [Text("Patch", "bold"), Text(visible(records.rollout.patch.diff))]
    if records.verdict is not None:
        failed = [(test, o) for test, o in records.verdict.outcomes.items() if o != "passed"]
        total = len(records.verdict.outcomes)
        parts.append(Text(f"Verdict: {total - len(failed)} of {total} expected tests passed", "bold"))
        parts += [Text(visible(f"{outcome}  {test}"), "dim") for test, outcome in failed[:20]]
        if any(outcome == "missing" for _, outcome in failed):
            parts.append(
                Text("missing: a test that did not run, as where its file cannot be imported", "dim")
            )
    return Text("\n").join(parts)
