"""Views of runs for people: one HTML page of one or several runs, and the same in a terminal."""

from woodshed.report.page import write

__all__ = ["write"]
