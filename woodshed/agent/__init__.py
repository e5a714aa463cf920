"""One attempt: the tools and the loop."""

from woodshed.agent.attempt import AgentSettings, Attempt, run, turn_seed
from woodshed.agent.tools import TOOLS

__all__ = ["TOOLS", "AgentSettings", "Attempt", "run", "turn_seed"]
