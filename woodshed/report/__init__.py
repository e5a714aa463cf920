"""What a person looks at: one HTML page per run."""

from woodshed.report.page import write

__all__ = ["write"]
