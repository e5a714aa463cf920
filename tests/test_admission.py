"""Admission of groups: no token is older than the bound, nothing is lost or counted twice, whatever dies when."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from scripted import FINISH, calc_task, play

from woodshed.experience.admission import Admission, refuse_older
from woodshed.records import RunError


@pytest.mark.parametrize(("per_step", "staleness"), [(1, 0), (1, 1), (3, 1), (4, 2), (5, 3), (7, 1), (2, 8)])
def test_the_bound_holds_and_no_group_is_lost_whatever_dies(per_step: int, staleness: int):
    """A random schedule of starts, ends, steps, slow updates and kills of either side, which knows its files only."""
    rng = random.Random(f"{per_step}/{staleness}")
    admission = Admission(per_step, staleness)
    versions: dict[int, int] = {}  # group to the version at its start, which draws.jsonl keeps
    done: set[int] = set()
    trained: list[range] = []
    published, stalest = 0, 0
    while len(trained) < 150:
        event = rng.random()
        if event < 0.3 and admission.startable():
            group = admission.startable()[0]
            versions[group] = admission.version
            admission.begin(group)
        elif event < 0.6 and (open_groups := sorted(set(versions) - done)):
            group = rng.choice(open_groups)
            done.add(group)
            admission.finish(group)
        elif event < 0.8 and (groups := admission.take()):
            stalest = max(stalest, *(len(trained) - versions[group] for group in groups))
            trained.append(groups)
            published = len(trained)
        elif event < 0.9 and published > admission.version:
            admission.publish(
                rng.randint(admission.version + 1, published)
            )  # not every version need be loaded
        elif event < 0.92:  # killed: all that is left is what the files hold
            admission = Admission(
                per_step, staleness, admission.version, begun=len(versions), taken=len(trained)
            )
            admission.finished |= {group for group in done if group >= len(trained) * per_step}
    assert stalest == staleness, "the bound is reached and never passed"
    assert [group for groups in trained for group in groups] == list(range(150 * per_step))


def test_a_group_that_may_not_begin_is_a_mistake():
    admission = Admission(2, 1)
    assert admission.startable() == range(4)
    for group in range(4):
        admission.begin(group)
    with pytest.raises(AssertionError, match="group 4 may not begin"):
        admission.begin(4)
    admission.publish(1)
    assert admission.startable() == range(4, 6) and admission.take() is None
    with pytest.raises(AssertionError, match="version 0 after 1"):
        admission.publish(0)


@pytest.mark.parametrize(
    ("version", "step", "fits"), [(3, 3, True), (2, 3, True), (1, 3, False), (4, 3, False)]
)
def test_the_trainer_refuses_an_older_attempt_by_name(tmp_path, version: int, step: int, fits: bool):
    made = play(calc_task(tmp_path / "calc"), FINISH)
    turn = replace(made.turns[0], versions=((version, len(made.turns[0].sampled_ids)),))
    made = replace(made, turns=(turn,))
    if fits:
        refuse_older([made], step, staleness=1)
        return
    with pytest.raises(
        RunError, match=rf"attempt {made.id} was sampled by version {version}.*versions 2 to 3"
    ):
        refuse_older([made], step, staleness=1)
