"""Experience: attempts in flight, graded and watched."""

from woodshed.experience.collector import Collector, RolloutSettings
from woodshed.experience.pipeline import Experience, HarnessSettings, Occasion, collect, token_texts

__all__ = [
    "Collector",
    "Experience",
    "HarnessSettings",
    "Occasion",
    "RolloutSettings",
    "collect",
    "token_texts",
]
