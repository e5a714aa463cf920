"""Several gloo processes on this machine, forked from one server that has loaded torch once.

With WOODSHED_TEST_DEVICE=cuda, what builds its models on `device()` has a GPU for each rank and exchanges over NCCL.
"""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import traceback
from pathlib import Path
from typing import Any

DEVICE = os.environ.get("WOODSHED_TEST_DEVICE", "cpu")
PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "woodshed.muon",
    "woodshed.parallel",
]


def device() -> Any:
    """Where this rank's models are, as torch.device; the first GPU without ranks."""
    import torch

    from woodshed.learning import ranks

    return torch.device(DEVICE, ranks.index()) if DEVICE == "cuda" else torch.device("cpu")


def fitting(sizes: tuple[int, ...]) -> list[int]:
    """Those numbers of ranks for which there are GPUs; all without GPUs."""
    import torch

    return [size for size in sizes if DEVICE == "cpu" or size <= torch.cuda.device_count()]


def launch(num_ranks: int, function: str, *args: Any, timeout_s: float = 280.0) -> list[Any]:
    """`module:function`(*args) in a process group of `num_ranks`; what each rank returned, in order of rank.

    Raises `AssertionError` with the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(rank, num_ranks, store, theirs, function, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def collect(pipes: list[Any], timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout_s)
        assert ready, f"ranks {sorted(waiting.values())} gave no answer in {timeout_s} s"
        for pipe in [each for each in waiting if each in ready]:
            rank = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                raise AssertionError(f"rank {rank} died") from None
            assert ok, f"rank {rank}:\n{value}"
            results[rank] = value
    return results


def work(rank: int, num_ranks: int, store: str, pipe: Any, function: str, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    backend = "gloo"
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    module, _, name = function.partition(":")
    try:
        answer = (True, getattr(importlib.import_module(module), name)(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    # plain pickle: the one of torch.multiprocessing shares memory with a process that is about to end
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0]:
        dist.barrier()
        dist.destroy_process_group()
