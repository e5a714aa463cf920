"""Grading: the patch alone, in a fresh sandbox, under tests that it could not touch."""

from woodshed.grading.judging import Judging, judge
from woodshed.grading.patches import crossing
from woodshed.grading.pytest_verifier import believed_tests, keep_isolated_tests
from woodshed.grading.results import TestRun
from woodshed.grading.session import run_tests, with_runner
from woodshed.grading.verifier import GradingSettings, Verifier, grade, outcomes_of

__all__ = [
    "GradingSettings",
    "Judging",
    "TestRun",
    "Verifier",
    "believed_tests",
    "crossing",
    "grade",
    "judge",
    "keep_isolated_tests",
    "outcomes_of",
    "run_tests",
    "with_runner",
]
