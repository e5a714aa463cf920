"""What a person can act on. The message names the parameter, its placement or value, and what would work."""

from __future__ import annotations


class MuonError(ValueError):
    """A parameter, layout, setting or gradient that sharded Muon cannot use."""
