"""Experience: attempts in flight, graded and watched."""

from woodshed.experience.collector import (
    Collector,
    Experience,
    HarnessSettings,
    Occasion,
    RolloutSettings,
    collect,
    token_texts,
)

__all__ = [
    "Collector",
    "Experience",
    "HarnessSettings",
    "Occasion",
    "RolloutSettings",
    "collect",
    "token_texts",
]
