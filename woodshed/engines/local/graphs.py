"""Decode steps on a GPU by replaying captured CUDA graphs, one for each shape.

The time of a decode step of a small model is that of launching about a thousand kernels. Captured shapes are fixed, so
the number of rows is padded to a power of two; padding rows attend only to themselves. The inputs of a step (tokens,
lengths, the column, random numbers) are in one small tensor that is filled before the replay. Method: CUDA graphs
(developer.nvidia.com/blog/cuda-graphs), as nano-vllm and vLLM use them.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from woodshed.engines.local.invariant import LEAST_ROWS, spans
from woodshed.engines.local.kv_cache import RunningBatch

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens (B, 1), spans (B, 1, 1, 2), positions (B, 1)) -> logits (B, V), writing into the running batch."""
Draw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits (B, V), uniform numbers (B,)) -> ids (B,), log-probs (B,)."""


class Graphs:
    """Decode steps of one running batch. Where they cannot be captured, the same steps run without."""

    def __init__(self, forward: Forward, draw: Draw, batch: RunningBatch, device: torch.device):
        self.forward, self.draw, self.batch, self.device = forward, draw, batch, device
        self.is_capturable = device.type == "cuda"
        """False on a CPU, and for a model whose forward waits for the card (routers of some mixtures of experts do)."""
        self._captured: dict[int, tuple[Any, Tensor]] = {}
        self._memory: tuple[tuple[int, torch.Size], ...] = ()
        self._pool: Any = None
        self._state = torch.zeros(0)
        self._staged = torch.zeros(0)

    def step(self, tokens: Sequence[int], uniforms: Sequence[float]) -> Tensor:
        """Process the last token of each live row and draw the next: (2, B) in float64 on the CPU, ids and
        log-probs."""
        batch, live = self.batch, len(tokens)
        rows = padded_rows(live)
        self._fit(rows)
        staged = self._staged
        staged[:, live:rows] = 0.0
        staged[0, :live] = torch.tensor(tokens, dtype=torch.float64)
        staged[1, :live] = torch.tensor(batch.lengths, dtype=torch.float64)
        staged[2, :live] = torch.tensor(uniforms, dtype=torch.float64)
        staged[3, 0] = batch.end
        self._state.copy_(staged, non_blocking=True)
        if self.is_capturable and rows not in self._captured:
            self._try_to_capture(rows)
        if not self.is_capturable:
            return self._drawn(rows)[:, :live].cpu()
        graph, drawn = self._captured[rows]
        graph.replay()
        return drawn[:, :live].cpu()

    def _try_to_capture(self, rows: int) -> None:
        try:
            self._captured[rows] = self._capture(rows)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.is_capturable = False
            self._captured.clear()
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"decode steps are launched one kernel at a time, which is slower: {reason}", stacklevel=2
            )

    def _fit(self, rows: int) -> None:
        """Discard graphs whose memory was reallocated, since they contain addresses and strides.

        Shapes are compared too: an allocator may reuse an address for another shape.
        """
        memory = tuple((tensor.data_ptr(), tensor.shape) for tensor in self.batch.tensors)
        if memory != self._memory or self._state.shape[-1:] < (rows,):
            self._captured.clear()
            self._pool = None  # a pool is freed with its last graph
            gc.collect()  # frees the pool of an older sampler too
            self._memory = memory
            columns = max(rows, self.batch.tensors[0].shape[1])
            self._state = torch.zeros((4, columns), dtype=torch.float64, device=self.device)
            self._staged = torch.zeros(
                (4, columns), dtype=torch.float64, pin_memory=self.device.type == "cuda"
            )

    def _capture(self, rows: int) -> tuple[Any, Tensor]:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(
            stream
        ):  # libraries allocate workspaces at their first call, before the capture
            for _ in range(2):
                self._drawn(rows)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with _uncollected(), torch.cuda.graph(graph, pool=self._pool):
            drawn = self._drawn(rows)
        return graph, drawn

    def _drawn(self, rows: int) -> Tensor:
        tokens, lengths = self._state[:2, :rows].long()
        column = self._state[3, :1].long()
        with self.batch.fixed(rows, column):
            logits = self.forward(tokens[:, None], spans(column - lengths, column), lengths[:, None])
        ids, logps = self.draw(logits, self._state[2, :rows])
        return torch.stack([ids.double(), logps.double()])


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection: freeing the graph of an older sampler would break the current capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def padded_rows(live: int) -> int:
    """Number of rows with padding: the next power of two."""
    return max(LEAST_ROWS, 1 << (live - 1).bit_length())
