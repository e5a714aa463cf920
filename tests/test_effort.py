"""The effort penalty against its formula and limits, and the counters of attempts that really happened."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scripted import EDIT, FINISH, PROSE, READ, calc_task, play, renderer

from woodshed.grading.effort import EffortSettings, concave, counters, penalties
from woodshed.tokens.token_kinds import token_kinds


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("k", [1e-3, 0.5])
def test_values_and_both_derivatives_follow_the_formula(k: float, q: float) -> None:
    def slope(x: float, h: float) -> float:
        return (concave(x + h, k=k, q=q) - concave(x - h, k=k, q=q)) / (2 * h)

    assert concave(0.0, k=k, q=q) == 0.0
    for x in (1.0, 30.0, 2000.0):
        h = 1e-4 * x
        assert slope(x, h) == pytest.approx((1 + k * x) ** -q, rel=1e-6)
        bend = (slope(x + h, h) - slope(x - h, h)) / (2 * h)
        assert bend == pytest.approx(-q * k * (1 + k * x) ** (-q - 1), rel=1e-3, abs=1e-7)  # concave
        if q != 1.0:
            assert concave(x, k=k, q=q) == pytest.approx(
                ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q)), rel=1e-9
            )


def test_its_limits() -> None:
    assert concave(7.0, k=0.2, q=0.0) == pytest.approx(7.0)
    assert concave(7.0, k=0.2, q=1.0) == pytest.approx(math.log(1 + 1.4) / 0.2)
    assert concave(7.0, k=0.2, q=1 + 1e-9) == pytest.approx(concave(7.0, k=0.2, q=1.0), rel=1e-6)
    assert concave(1e15, k=0.2, q=2.0) == pytest.approx(1 / (0.2 * 1.0), rel=1e-6)  # a ceiling


def test_counters_of_a_real_attempt(tmp_path: Path) -> None:
    rollout = play(calc_task(tmp_path / "calc"), PROSE, f"First I look. {READ}", EDIT, FINISH)
    found = counters(rollout, renderer())
    sampled = rollout.counters["sampled_tokens"]
    assert found["thinking_tokens"] + found["call_tokens"] + found["message_tokens"] == sampled
    assert found["message_tokens"] == 0 and found["calls"] == 3 and found["turns"] == 4
    words = renderer().encode_message(PROSE)[:-1]
    assert found["thinking_tokens"] >= len(words) + 3
    assert found["output_tokens"] == sum(len(t.context_ids) - t.opening for t in rollout.turns[1:])


def test_a_longer_attempt_pays_more_and_nobody_pays_by_default(tmp_path: Path) -> None:
    task = calc_task(tmp_path / "calc")
    short, long = play(task, FINISH), play(task, READ, EDIT, READ, FINISH)
    assert penalties([short], renderer(), EffortSettings()) == {}
    dear = EffortSettings(weight=1.0)
    costs = [penalties([r], renderer(), dear)[r.id] for r in (short, long)]
    assert 0 < costs[0] < costs[1] < 1


# --- what each token is for -----------------------------------------------------------------------------------------


def spelled(turn, kinds: tuple[str, ...], kind: str) -> str:
    return renderer().decode([i for i, k in zip(turn.sampled_ids, kinds, strict=True) if k == kind])


def test_every_token_of_a_message_has_its_kind(tmp_path: Path) -> None:
    rollout = play(calc_task(tmp_path / "calc"), f"First I look, für x.\n{READ} Then.", PROSE, FINISH)
    turn = rollout.turns[0]
    kinds = token_kinds(turn, renderer())
    assert len(kinds) == len(turn.sampled_ids) and kinds[-1] == "template"
    assert spelled(turn, kinds, "call") == "read_file calc.py 1 2"
    assert spelled(turn, kinds, "thinking") == "First I look, für x.\n Then."
    assert spelled(turn, kinds, "template").startswith("<call></call>")
    assert set(token_kinds(rollout.turns[1], renderer())) == {"message", "template"}
