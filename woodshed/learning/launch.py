"""Processes of a run over several ranks: how they meet, and how all of them end when one does.

torchrun starts them with equal command lines. Rank 0 runs the stages; the others wait until it says what is trained.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from woodshed.learning import ranks
from woodshed.learning.layout import LayoutSettings
from woodshed.learning.policy import PolicySettings
from woodshed.learning.ranks import EXCHANGE, RankCalls
from woodshed.records import RunError

WAIT = timedelta(days=365)
"""Longest time between two commands of rank 0, which waits for attempts and servers."""
GRACE = timedelta(seconds=2)
"""Time in which rank 0 tells an error that all ranks have met."""
LOST = re.compile(r"/gloo/|NCCL")
"""In the text of an error of whose making another rank is: it has ended, or hangs."""
JOB, FAILED = "woodshed/job", "woodshed/failed"


@dataclass(frozen=True)
class Job:
    """A run of training, as rank 0 describes it to the others."""

    policy: PolicySettings
    layout: LayoutSettings
    seed: int
    run: Path
    resuming: str
    """The command that goes on with the run."""


class EndedError(BaseException):
    """torchrun ends this rank, mostly since another one has ended."""


def is_follower() -> bool:
    """Say if torchrun started this process as another rank than 0."""
    return ranks.started() > 1 and int(os.environ.get("RANK", "0")) > 0


@contextmanager
def leading(job: Job) -> Iterator[RankCalls]:
    """Meet the other ranks as rank 0, and give what commands them.

    Raises:
        RunError: a rank has ended or hangs. Where that rank has told the reason, the process ends with exit code 1.
    """
    if ranks.started() == 1:
        yield RankCalls()
        return
    store = next(rendezvous("env://"))[0]
    store.set(JOB, pickle.dumps(job))  # pyright: ignore[reportArgumentType]  # bytes as they are
    with _joined(store, job) as commands:
        yield commands


@contextmanager
def following() -> Iterator[tuple[Job, RankCalls]]:
    """Meet the other ranks as one that rank 0 commands, and give its job and its commands.

    Raises:
        RunError: as `leading`.
    """
    store = next(rendezvous("env://"))[0]
    store.set_timeout(WAIT)
    job = pickle.loads(store.get(JOB))  # of rank 0, which runs the same command
    store.set_timeout(EXCHANGE)
    with _joined(store, job) as commands:
        yield job, commands


@contextmanager
def _joined(store: Any, job: Job) -> Iterator[RankCalls]:
    """Rank 0's commands in a process group of all ranks, on the device of each; one rank tells an error inside."""
    signal.signal(signal.SIGTERM, _end)
    try:
        is_cuda = job.policy.resolved_device() == "cuda"
        if is_cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        rank, world = int(os.environ["RANK"]), ranks.started()
        group = PrefixStore("woodshed/group", store)
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=EXCHANGE)
        yield RankCalls(cast("dist.ProcessGroup", dist.new_group(timeout=WAIT, backend="gloo")))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end is under way, and has something to say
        _raise_once(store, job, error)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(_signal: int, _frame: object) -> NoReturn:
    raise EndedError("this process was told to end")


def _raise_once(store: Any, job: Job, error: BaseException) -> NoReturn:
    """Raise the error of this rank, or end silently where another rank tells why the run ends."""
    is_lost = isinstance(error, EndedError | dist.DistError) or bool(LOST.search(str(error)))
    is_told_here = _is_first(store) or not (is_follower() or is_lost)
    if not is_told_here or (is_follower() and isinstance(error, KeyboardInterrupt)):
        raise SystemExit(1) from None
    if not is_lost:
        raise error
    reason = str(error).strip().partition("\n")[0]
    raise RunError(
        f"another rank of the run has ended or does not answer ({reason}), and training needs all of them; torchrun "
        f"says which. What was complete is kept: go on with `{job.resuming}`"
    ) from error


def _is_first(store: Any) -> bool:
    """Say if no other rank has told an error yet; ranks that rank 0 commands leave it to that one for a moment."""
    try:
        if is_follower():
            with suppress(dist.DistError):
                store.wait([FAILED], GRACE)
        return store.add(FAILED, 1) == 1
    except RuntimeError:  # the store has ended with the process that kept it
        return True
