"""`woodshed` in a process of its own, forked from one server that has loaded torch once, which saves each start the
seconds of importing it."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from pathlib import Path

PRELOAD = [
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "peft",
    "woodshed.cli.train",
    "woodshed.stages.plan",
]


class Forked:
    """A command that runs. It prints to a file, and writes none larger than `most_bytes`."""

    def __init__(self, output: Path, *arguments: str, most_bytes: int = resource.RLIM_INFINITY) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._output = output
        self._process = context.Process(target=_main, args=(output, arguments, most_bytes))
        self._process.start()

    def is_running(self) -> bool:
        return self._process.is_alive()

    def killed(self) -> bool:
        """Kill it; False if it had ended."""
        self._process.kill()
        self._process.join()
        return self._process.exitcode == -signal.SIGKILL

    def ended(self, code: int = 0) -> str:
        """What it printed until its end, which is this exit code."""
        self._process.join(240)
        output = self._output.read_text()
        assert self._process.exitcode == code, output
        return output


def _main(output: Path, arguments: tuple[str, ...], most_bytes: int) -> None:
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from woodshed.cli import main

    torch.set_num_threads(1)
    sys.argv = ["woodshed", *arguments]
    main()
