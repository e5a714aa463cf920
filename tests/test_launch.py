"""Of several ranks that end, one says why."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from woodshed.learning import launch
from woodshed.learning.launch import EndedError, Job
from woodshed.learning.layout import LayoutSettings
from woodshed.learning.policy import PolicySettings
from woodshed.records import RecipeError, RunError

JOB = Job(PolicySettings(), LayoutSettings(fsdp=2), 0, Path("runs/x"), "woodshed train --resume runs/x")
OWN = RecipeError("the gradient is nan")
LOST = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:123"
)
SAYS_HOW = r"another rank of the run has ended.*Connection closed by peer.*`woodshed train --resume runs/x`"


@pytest.mark.parametrize(
    ("rank", "error", "raised", "message"),
    [
        (0, OWN, RecipeError, "the gradient is nan"),
        (1, OWN, RecipeError, "the gradient is nan"),
        (0, LOST, RunError, SAYS_HOW),
        (1, LOST, RunError, SAYS_HOW),
        (0, EndedError("told to end"), RunError, r"another rank .*told to end"),
        (0, KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (1, KeyboardInterrupt(), SystemExit, "^1$"),
    ],
)
def test_an_error_is_told_once(
    monkeypatch: pytest.MonkeyPatch, rank: int, error: BaseException, raised: type, message: str
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(launch, "GRACE", timedelta(milliseconds=1))
    monkeypatch.setenv("RANK", str(rank))
    store = HashStore()
    with pytest.raises(raised, match=message):
        launch._raise_once(store, JOB, error)
    # every other rank now ends silently, but rank 0 with an error of its own, which all of them meet
    monkeypatch.setenv("RANK", str(1 - rank))
    for later in (OWN, LOST):
        expected = RecipeError if rank == 1 and later is OWN else SystemExit
        with pytest.raises(expected):
            launch._raise_once(store, JOB, later)


def test_a_server_that_is_lost_is_no_lost_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = RuntimeError("connection refused by http://localhost:8000, which timed out")
    with pytest.raises(RuntimeError, match="connection refused"):
        launch._raise_once(HashStore(), JOB, error)
