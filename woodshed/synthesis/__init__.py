"""Where practice comes from: real repositories in, proven tasks out.

`sources` fetches a clean copy, `project` and `baseline` find out how to run its tests, `operators` and `closure` take
something away, `pruning` and `instructions` make what is left into a task, `proof` proves it, `make` writes them all.
"""

from woodshed.synthesis.bench import SynthesisSettings
from woodshed.synthesis.make import MakeReport, make
from woodshed.synthesis.proof import check

__all__ = ["MakeReport", "SynthesisSettings", "check", "make"]
