"""Checks of this machine, each tried rather than guessed, with a remedy for every failure."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

from woodshed.runs import machine
from woodshed.sandbox import Check
from woodshed.sandbox.probe import probe
from woodshed.tasks.environment import cache_dir

PYTHONS = ((3, 11), (3, 13))
MEMORY_GB = 6.0  # what the quickstart may take
DISK_GB = 3.0  # weights, environments and a run

_TORCH = "import torch as t; print(t.__version__, t.get_num_threads(), t.cuda.is_available(), t.cuda.device_count())"


def examine(*, endpoint: str = "") -> Iterator[tuple[Check, bool]]:
    """Every check and whether Woodshed is useless without it, one by one as they are done; some seconds in all."""
    yield _python(), True
    for check in probe():
        yield check, check.name != "access log"
    yield _disk(), True
    yield _memory(), False
    yield from ((check, False) for check in _torch())
    if endpoint:
        yield _endpoint(endpoint), True


def _python() -> Check:
    low, high = PYTHONS
    ok = low <= sys.version_info[:2] <= high
    return Check(
        "python",
        ok,
        f"{platform.python_version()} ({sys.executable})",
        f"use Python {low[0]}.{low[1]} to {high[0]}.{high[1]}",
    )


def _disk() -> Check:
    folder = cache_dir()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    remedy = f"make {DISK_GB:.0f} GB of room there, or set WOODSHED_CACHE to another folder"
    return Check("disk", free >= DISK_GB, f"{free:.1f} GB free for {folder}", remedy)


def _memory() -> Check:
    has = machine.memory_gb()
    remedy = f"the quickstart may need {MEMORY_GB:.0f} GB; take shorter turns and fewer rows (rollout.max_in_flight)"
    return Check("memory", has >= MEMORY_GB, f"{has:.1f} GB, {machine.cores()} cores", remedy)


def _torch() -> Iterator[Check]:
    """PyTorch is tried in a process of its own: a broken installation may take its process down."""
    done = subprocess.run([sys.executable, "-P", "-c", _TORCH], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["it could not be imported"])[-1]
        remedy = (
            "to train or to load weights here: pip install 'woodshed[train]' (an --endpoint works without)"
        )
        yield Check("torch", False, why, remedy)
        return
    version, threads, cuda, devices = done.stdout.split()
    yield Check("torch", True, f"{version}, {threads} threads")
    names = ", ".join(machine.gpus())
    if cuda == "True":
        yield Check("gpu", True, names or f"{devices} CUDA devices")
    elif names:
        yield Check(
            "gpu", False, f"{names}, but this PyTorch cannot use it", "install a CUDA build of PyTorch"
        )
    else:
        yield Check("gpu", False, "none", "not needed by the quickstart; bigger models want one")


def _endpoint(url: str) -> Check:
    import httpx

    from woodshed.engines.http import address

    try:
        answer = httpx.get(f"{address(url)}/v1/models", timeout=10)
        models = [model["id"] for model in answer.raise_for_status().json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        remedy = "start the server, or give the address in front of /v1/models"
        return Check("endpoint", False, f"{url}: {why}", remedy)
    return Check("endpoint", True, f"{url} serves {', '.join(models) or 'no model'}")
