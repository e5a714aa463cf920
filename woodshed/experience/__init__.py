"""Many attempts at once: groups of attempts at one task, made in waves."""

from woodshed.experience.collector import RolloutSettings, collect, waves

__all__ = ["RolloutSettings", "collect", "waves"]
