"""Did it work, and can that be believed: the patch alone, in a fresh sandbox, under tests that it could not touch."""

from woodshed.grading.verifier import (
    GradingSettings,
    Judging,
    TestRun,
    crossing,
    judge,
    run_tests,
    verify,
    with_runner,
)

__all__ = ["GradingSettings", "Judging", "TestRun", "crossing", "judge", "run_tests", "verify", "with_runner"]
