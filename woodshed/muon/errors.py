"""Errors that a person can act on. Each names the parameter, its placement or value, and a remedy."""

from __future__ import annotations


class MuonError(ValueError):
    """A parameter, layout, setting or gradient that sharded Muon cannot use."""
