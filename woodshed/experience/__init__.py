"""Experience: attempts in flight, graded and watched."""

from woodshed.experience.collector import Collector, collect, token_texts
from woodshed.experience.occasion import Experience, HarnessSettings, Occasion, RolloutSettings

__all__ = [
    "Collector",
    "Experience",
    "HarnessSettings",
    "Occasion",
    "RolloutSettings",
    "collect",
    "token_texts",
]
