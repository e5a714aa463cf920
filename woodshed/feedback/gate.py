"""Hints must help or go: what is measured of a class of hints, and what it has to reach.

Two prototypes: a hint that names a line which is no longer there made the next turn worse, and a policy that was never
shown reminders erred *more* under one although the faulty tokens had become less likely. So two things are measured at
faulty turns, both against a placebo and a hint of another class: how much less likely the hint makes the faulty
tokens, and how often the turn is faulty again when it is drawn anew under the hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from woodshed.feedback.detectors import DETECTORS
from woodshed.settings import Settings

Side = Literal["plain", "hint", "placebo", "wrong"]
SIDES: tuple[Side, ...] = ("plain", "hint", "placebo", "wrong")


ROUNDING = 1e-9  # 3/20 less 2/20 is a twentieth, and in floating point a little less


class GateSettings(Settings):
    """Evidence that a class of hints must show before it is trained on."""

    every: int = Field(default=0, ge=0)
    """Steps between measurements; 0 never measures, and every class is trained on."""
    turns: int = Field(default=24, ge=1)
    """Faulty turns of each class that are measured, spread evenly over the step's."""
    min_turns: int = Field(default=8, ge=1)
    """A class with fewer is not judged: it stays as it was."""
    max_gain: float = -1.0
    """The hint must change the faulty turn's log-prob by at most this many nats, in the mean."""
    min_lowered: float = Field(default=0.95, ge=0, le=1)
    """Share of turns whose log-prob the hint must lower."""
    max_ratio: float = Field(default=0.5, ge=0)
    """Drawn again under the hint, turns must be faulty at most this times as often as without."""
    margin: float = Field(default=0.05, ge=0)
    """... and by at least this share less often than under a placebo and than under a hint of another class."""


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
    """Side to how many of the turns were faulty again when drawn anew."""

    def rate(self, side: Side) -> float:
        """Share of turns that are faulty when they are drawn again."""
        return self.faulty[side] / self.num_turns


def why_not(measured: GateMeasurement, settings: GateSettings) -> str | None:
    """Why a class of hints must not be trained on; "" where it may; None where too little was seen to say."""
    if measured.num_turns < settings.min_turns:
        return None
    if measured.gain["hint"] > settings.max_gain:
        return f"gain {measured.gain['hint']:+.2f} nats, not at most {settings.max_gain:+.2f}"
    if measured.gain["hint"] >= measured.gain["placebo"]:
        return f"gain {measured.gain['hint']:+.2f} nats, a placebo's {measured.gain['placebo']:+.2f}"
    if measured.lowered < settings.min_lowered - ROUNDING:
        return f"lowers {measured.lowered:.0%} of turns, not {settings.min_lowered:.0%}"
    hinted = measured.rate("hint")
    if hinted > settings.max_ratio * measured.rate("plain") + ROUNDING:
        return f"drawn again {hinted:.0%} faulty, {measured.rate('plain'):.0%} without the hint"
    controls: tuple[tuple[Side, str], ...] = (("placebo", "a placebo"), ("wrong", "another class's hint"))
    for side, name in controls:
        if measured.rate(side) - hinted < settings.margin - ROUNDING:
            return f"drawn again {hinted:.0%} faulty, {measured.rate(side):.0%} under {name}"
    return ""


def switched_off(
    before: Mapping[str, str], found: Sequence[GateMeasurement], settings: GateSettings
) -> dict[str, str]:
    """The classes that are not trained on from here, with the reason. A class that passes comes back."""
    now = dict(before)
    for measured in found:
        reason = why_not(measured, settings)
        if reason:
            now[measured.detector] = reason
        elif reason is not None:
            now.pop(measured.detector, None)
    return now


def another_class(detector: str) -> str:
    """The class whose hint is the wrong one for this: half the list away, so that neighbours in kind are not taken."""
    names = list(DETECTORS)
    return names[(names.index(detector) + len(names) // 2) % len(names)] if detector in names else names[0]
