"""Synthesis of practice tasks: real repositories in, proven tasks out.

`sources` fetches a clean copy, `project` and `baseline` find out how to run its tests, and `coverage_map` which test
runs which lines; `discovery` finds features, `operators` and `closure` remove one, `visibility` and `instructions` make
a task of the rest, `proof` and `mutation_score` prove it, and `make` writes them all. `impossible`, `test_writing` and
`history` make other tasks.
"""

from woodshed.synthesis.make import MakeReport, make
from woodshed.synthesis.recheck import check
from woodshed.synthesis.repository_context import SynthesisSettings

__all__ = ["MakeReport", "SynthesisSettings", "check", "make"]
