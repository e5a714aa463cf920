"""Decisions of a person about solutions, as verdicts that training reads.

Every attempt counts. What was accepted is paid in full, what was edited by the share of its lines that stayed, what was
rejected is not paid, and neither is an attempt that changed nothing: a broken call that ended the work is a failure,
and so is a question in place of work, or else a policy would learn to ask where it might fail.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from woodshed.records import Patch, Rollout, Verdict

Decision = Literal["accepted", "edited", "rejected", "unchanged"]


@dataclass(frozen=True)
class Solution:
    """A person's decision about one attempt."""

    rollout_id: str
    request: str
    repository: str
    """Top folder of the repository."""
    commit: str
    """The commit that was checked out."""
    decision: Decision | None
    """None where nobody was asked."""
    applied: Patch | None
    """Changes that went into the working tree; None if none did."""


def verdict(rollout: Rollout, decision: Decision, kept: float = 0.0) -> Verdict:
    """The decision as a verdict.

    Args:
        kept: share of an edited solution that stayed (`kept_share`).
    """
    is_void = rollout.ended == "sandbox_lost"
    reward = {"accepted": 1.0, "edited": kept}.get(decision, 0.0)
    return Verdict(
        rollout_id=rollout.id,
        task_id=rollout.task_id,
        status="invalid" if is_void else "graded",
        reward=0.0 if is_void else reward,
        solved=decision == "accepted" and not is_void,
        outcomes={},
        detail=decision,
    )


def kept_share(proposed: Counter[tuple[str, str]], final: Counter[tuple[str, str]]) -> float:
    """Share of the lines that either version adds or removes (`changed_lines`) which both of them do, in [0, 1]."""
    union = (proposed | final).total()
    return (proposed & final).total() / union if union else 0.0
