"""Evaluation of policies: suites of tasks, measures of attempts, figures with intervals."""

from woodshed.evals.measures import summarize

__all__ = ["summarize"]
