"""Gate for classes of hints: measurements of a class, and the thresholds that they must reach.

Prototypes showed two ways in which hints fail. A hint that named a line which no longer existed made the next turn
worse; and a policy that had never seen reminders made *more* mistakes with one, although the faulty tokens had become
less likely. So two quantities are measured at faulty turns: the change of the faulty tokens' log-prob under the hint,
and the share of turns that are faulty again when they are sampled anew under it. Both are compared with a placebo and
with a hint of another class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from woodshed.feedback.detectors import DETECTORS
from woodshed.settings import Settings

Side = Literal["plain", "hint", "placebo", "wrong"]
SIDES: tuple[Side, ...] = ("plain", "hint", "placebo", "wrong")


ROUNDING = 1e-9  # 3/20 - 2/20 should be 1/20; in floating point it is slightly smaller


class GateSettings(Settings):
    """Measurements of classes of hints, which must help before they are trained on."""

    every: int = Field(default=0, ge=0)
    """Steps between measurements; 0 never measures, and every class is trained on."""
    turns: ClassVar[int] = 96
    """Most faulty turns to measure in each class, spread evenly over those of the step."""


@dataclass(frozen=True)
class GateBars:
    """Figures that a class of hints must reach."""

    min_turns: int = 8
    """Fewest measured turns for a decision; with fewer, a class stays on or off as it was."""
    max_gain: float = -1.0
    """Largest mean change of a faulty turn's log-prob under the hint, in nats: -1 demands a drop by one nat."""
    min_lowered: float = 0.95
    """Smallest share of turns whose log-prob the hint lowers."""
    max_ratio: float = 0.5
    """Largest ratio of the fault rate under the hint to the fault rate without it, of turns sampled anew."""
    margin: float = 0.05
    """Smallest advantage of the hint's fault rate over the rates under a placebo and under another class's hint: 0.05
    demands five percentage points less."""


BARS = GateBars()


@dataclass(frozen=True)
class GateMeasurement:
    """One class of hints on the turns of one step."""

    detector: str
    num_turns: int
    gain: dict[str, float]
    """Side to the mean change of the faulty turn's log-prob, in nats."""
    lowered: float
    """Share of turns whose log-prob the hint lowers."""
    faulty: dict[str, int]
    """Side to the number of turns that were faulty again when they were sampled anew."""

    def rate(self, side: Side) -> float:
        """Fault rate of the turns when they are sampled anew."""
        return self.faulty[side] / self.num_turns


def why_not(measured: GateMeasurement, bars: GateBars = BARS) -> str | None:
    """Reason to switch a class of hints off; "" if it may be trained on, None if too few turns were measured."""
    if measured.num_turns < bars.min_turns:
        return None
    if measured.gain["hint"] > bars.max_gain:
        return f"gain {measured.gain['hint']:+.2f} nats, not at most {bars.max_gain:+.2f}"
    if measured.gain["hint"] >= measured.gain["placebo"]:
        return f"gain {measured.gain['hint']:+.2f} nats, a placebo's {measured.gain['placebo']:+.2f}"
    if measured.lowered < bars.min_lowered - ROUNDING:
        return f"lowers {measured.lowered:.0%} of turns, not {bars.min_lowered:.0%}"
    hinted = measured.rate("hint")
    if hinted > bars.max_ratio * measured.rate("plain") + ROUNDING:
        return f"drawn again {hinted:.0%} faulty, {measured.rate('plain'):.0%} without the hint"
    controls: tuple[tuple[Side, str], ...] = (("placebo", "a placebo"), ("wrong", "another class's hint"))
    for side, name in controls:
        if measured.rate(side) - hinted < bars.margin - ROUNDING:
            return f"drawn again {hinted:.0%} faulty, {measured.rate(side):.0%} under {name}"
    return ""


def switched_off(
    before: Mapping[str, str], measurements: Sequence[GateMeasurement], bars: GateBars = BARS
) -> dict[str, str]:
    """Classes that are switched off from now on, with the reason. A class that passes is switched on again."""
    now = dict(before)
    for measured in measurements:
        reason = why_not(measured, bars)
        if reason:
            now[measured.detector] = reason
        elif reason is not None:
            now.pop(measured.detector, None)
    return now


def another_class(detector: str) -> str:
    """Class whose hint serves as the wrong hint for this class: half the list away, because neighbours are similar."""
    names = list(DETECTORS)
    return names[(names.index(detector) + len(names) // 2) % len(names)] if detector in names else names[0]
