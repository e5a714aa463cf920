"""Checks of this machine. Each feature is really tried, and every failure has a remedy."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

from woodshed.records import WoodshedError
from woodshed.runs import machine
from woodshed.sandbox import Check
from woodshed.sandbox.probe import probe
from woodshed.tasks.environment import cache_dir

PYTHONS = ((3, 11), (3, 13))
MEMORY_GB = 6.0  # needed by the quickstart
VLLM_S = 300.0  # to import it, which reads gigabytes
DISK_GB = 3.0  # for weights, environments and a run

_TORCH = "import torch as t; print(t.__version__, t.get_num_threads(), t.cuda.is_available(), t.cuda.device_count())"


def examine(*, endpoint: str = "") -> Iterator[tuple[Check, bool]]:
    """Yield (check, True if Woodshed cannot run without it), one by one; takes some seconds."""
    yield _python(), True
    for check in probe():
        yield check, check.name != "access log"
    yield _disk(), True
    yield _memory(), False
    yield from ((check, False) for check in _torch())
    yield _vllm(), False
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
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    remedy = f"free {DISK_GB:.0f} GB there, or set WOODSHED_CACHE to another folder"
    return Check("disk", free >= DISK_GB, f"{free:.1f} GB free for {folder}", remedy)


def _memory() -> Check:
    total_gb = machine.memory_gb()
    remedy = (
        f"the quickstart may need {MEMORY_GB:.0f} GB; use shorter turns and fewer attempts at a time "
        "(rollout.max_in_flight)"
    )
    return Check("memory", total_gb >= MEMORY_GB, f"{total_gb:.1f} GB, {machine.cores()} cores", remedy)


def _torch() -> Iterator[Check]:
    """Checks of PyTorch in another process, since a broken installation may crash it."""
    done = subprocess.run([sys.executable, "-P", "-c", _TORCH], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        error = (done.stderr.strip().splitlines() or ["it could not be imported"])[-1]
        remedy = (
            "to train or to load weights here: pip install 'woodshed[train]' (an --endpoint works without)"
        )
        yield Check("torch", False, error, remedy)
        return
    version, threads, cuda, devices = done.stdout.split()
    yield Check("torch", True, f"{version}, {threads} thread{'' if threads == '1' else 's'}")
    names = ", ".join(machine.gpus())
    if cuda == "True":
        yield Check("gpu", True, names or f"{devices} CUDA devices")
    elif names:
        yield Check(
            "gpu", False, f"{names}, but this PyTorch cannot use it", "install a CUDA build of PyTorch"
        )
    else:
        yield Check("gpu", False, "none", "the quickstart needs none; larger models do")


def _vllm() -> Check:
    """vLLM for engine.kind = "vllm", which lives in an environment of its own."""
    from woodshed.engines import vllm

    try:
        program = vllm.find()
        done = subprocess.run(
            [program.python, "-P", "-c", "import vllm"], capture_output=True, text=True, timeout=VLLM_S
        )
    except (WoodshedError, subprocess.TimeoutExpired) as error:
        return Check("vllm", False, "none that can be started", f"only for engine.kind = 'vllm': {error}")
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["it could not be imported"])[-1]
        return Check("vllm", False, f"{program.version} ({program.python}): {error}", "install it anew")
    return Check("vllm", True, f"{program.version}{' for CPUs' if program.is_cpu else ''} ({program.python})")


def _endpoint(url: str) -> Check:
    from woodshed.engines.http import EndpointSettings, trust
    from woodshed.engines.speech import listen
    from woodshed.settings import read

    try:
        server = read(EndpointSettings, None, [f"url={json.dumps(url)}"])
        trust(server.url)  # the person named it
        speech = listen(server)
    except WoodshedError as error:
        return Check("endpoint", False, f"{url}: {error}", "start the server, or correct its address or key")
    served = f"{url} serves {', '.join(speech.served) or 'no model'}"
    if speech.takes_token_ids:
        return Check("endpoint", True, f"{served}, and takes token ids: for evaluation and training")
    if speech.takes_text:
        use = f"`woodshed eval TASKS --endpoint {url} --model NAME engine.kind=chat`"
        return Check("endpoint", True, f"{served}, as text only: for evaluation, {use}, and not for training")
    remedy = "serve the model with /v1/completions (vLLM) or /v1/chat/completions"
    return Check("endpoint", False, f"{served}, but answers no message: {speech.refusal}", remedy)
