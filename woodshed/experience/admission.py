"""Bounded staleness: the groups of attempts that may begin, and those that a step takes.

Groups are numbered in the order in which they are drawn. Step j takes the groups j P to (j + 1) P - 1, where P is the
number of groups in a step, and group g may begin once

    g < (version + S + 1) P

where version is the oldest one that samples, and S the staleness. A group that begins at version v is then taken by
step g // P <= v + S, and samplers only move forward: no token is more than S steps behind the step that learns from it.
Nothing that is finished is thrown away, whatever its age or length, which would starve hard tasks.

Pure: no clock, no files. It is rebuilt from what the run folder holds (`draws`, complete batches, published versions).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from woodshed.records import Rollout, RunError


@dataclass
class Admission:
    """Groups that have begun, are finished, and were taken."""

    per_step: int
    """P, groups in a step."""
    staleness: int
    """S, steps that a token may be behind the step that learns from it."""
    version: int = 0
    """Oldest version of the policy that samples."""
    begun: int = 0
    """Groups that have begun: those with a smaller number."""
    taken: int = 0
    """Steps whose groups were taken."""
    finished: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        """Number of the first group that may not begin yet."""
        return (self.version + self.staleness + 1) * self.per_step

    def startable(self) -> range:
        """Groups that may begin now, oldest first."""
        return range(self.begun, max(self.begun, self.end))

    def begin(self, group: int) -> None:
        """Note that a group has begun; groups begin in order."""
        assert group == self.begun < self.end, f"group {group} may not begin after {self.begun} of {self.end}"
        self.begun += 1

    def finish(self, group: int) -> None:
        """Note that all attempts of a group are kept, graded and monitored."""
        assert group < self.begun, f"group {group} has not begun"
        self.finished.add(group)

    def groups(self, step: int) -> range:
        """Numbers of the groups of a step."""
        return range(step * self.per_step, (step + 1) * self.per_step)

    def take(self) -> range | None:
        """The groups of the next step, once all of them are finished."""
        groups = self.groups(self.taken)
        if not self.finished.issuperset(groups):
            return None
        self.finished.difference_update(groups)
        self.taken += 1
        return groups

    def publish(self, version: int) -> None:
        """Note the version that samples from now on; it never goes back."""
        assert version >= self.version, f"version {version} after {self.version}"
        self.version = version


def refuse_older(rollouts: Collection[Rollout], step: int, staleness: int) -> None:
    """Check that no token of a step's attempts is further behind it than allowed, nor ahead.

    Raises:
        RunError: names the attempt.
    """
    for rollout in rollouts:
        for turn in rollout.turns:
            for version, _ in turn.versions:
                if not step - staleness <= version <= step:
                    raise RunError(
                        f"attempt {rollout.id} was sampled by version {version} of the policy, and step {step} learns "
                        f"from versions {max(0, step - staleness)} to {step} (rl.staleness = {staleness}); attempts of "
                        "other weights cannot be used. Copy the run's recipe.toml and start under another name"
                    )
