"""Did it work, and can that be believed: the patch alone, in a fresh sandbox, under tests that it could not touch."""

from woodshed.grading.judging import Judging, judge
from woodshed.grading.patches import crossing
from woodshed.grading.session import TestRun, run_tests, with_runner
from woodshed.grading.verifier import GradingSettings, Verifier, grade

__all__ = [
    "GradingSettings",
    "Judging",
    "TestRun",
    "Verifier",
    "crossing",
    "grade",
    "judge",
    "run_tests",
    "with_runner",
]
