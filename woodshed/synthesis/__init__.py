"""Synthesis of practice tasks: real repositories in, proven tasks out.

`sources` fetches a clean copy, `project` and `baseline` find out how to run its tests, `maps` which test touches what;
`discovery` finds features, `operators` and `closure` take one away, `visibility` and `instructions` make what is left
into a task, `proof` and `strength` prove it, `make` writes them all. `derived` and `history` are other sources.
"""

from woodshed.synthesis.make import MakeReport, make
from woodshed.synthesis.proof import check
from woodshed.synthesis.repository_context import SynthesisSettings

__all__ = ["MakeReport", "SynthesisSettings", "check", "make"]
