"""The Triton kernels against torch, by Triton's interpreter (`conftest`). Skipped where Triton is missing."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from woodshed.muon import elementwise, kernels, newton_schulz
from woodshed.muon.elementwise import Regions

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU: TRITON_INTERPRET=1 pytest " + __file__
    ),
]

Shapes = list[tuple[int, int]]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("m", "k"), [(40, 72), (130, 200), (300, 96)])
def test_half_of_a_symmetric_product(m: int, k: int):
    x = randn(2, m, k)
    gram = kernels.symmetric_product(x, x, None, 1.0, 0.0)
    torch.testing.assert_close(gram, x @ x.mT, rtol=1e-4, atol=1e-3)
    out = kernels.symmetric_product(gram, gram, gram, 0.5, -2.0)
    expected = 0.5 * gram @ gram - 2.0 * gram
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    if out.is_cuda:
        assert torch.equal(out, out.mT)
    else:  # the interpreter's products are numpy's, whose order of sums is its BLAS library's
        torch.testing.assert_close(out, out.mT, rtol=1e-6, atol=1e-6 * expected.abs().max().item())
    transposed = randn(2, k, m).mT  # what a tall batch passes
    torch.testing.assert_close(
        kernels.symmetric_product(transposed, transposed, None, 1.0, 0.0),
        transposed @ transposed.mT,
        rtol=1e-4,
        atol=1e-3,
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN
def test_norms_in_one_pass():
    x = randn(5, 60, 90)
    x[1] *= 1e-25
    x[2] = 0
    x[3, 4, 5] = float("nan")
    x[4, 4, 5] = float("inf")
    ours = kernels.normalised(x, torch.float32)
    torch.testing.assert_close(ours, newton_schulz.normalised(x, torch.float32), rtol=1e-5, atol=1e-8)
    assert not ours[2:].any()


def regions_of(tensors: list[int], offsets: list[int], shapes: Shapes, strides: list[int]) -> Regions:
    regions = Regions()
    for tensor, offset, (rows, cols), stride in zip(tensors, offsets, shapes, strides, strict=True):
        regions.add(tensor, offset, rows, cols, stride)
    return regions


ODD: Shapes = [(3, 4), (1, 6), (70, 100)]
EVEN: Shapes = [(3, 8), (1, 16), (70, 104)]
"""The last region of both is longer than a program; rows of `EVEN` can be moved eight elements at once."""


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("wire", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("shapes", "offsets", "strides", "out_offset", "group"),
    [
        (ODD, [2, 50, 7], [10, 6, 110], 5, 1),
        (EVEN, [8, 40, 16], [16, 16, 112], 24, 8),
        (EVEN, [2, 40, 16], [8, 16, 104], 24, 1),
    ],
)
def test_regions_equal_the_loops(
    nesterov: bool,
    wire: torch.dtype,
    shapes: Shapes,
    offsets: list[int],
    strides: list[int],
    out_offset: int,
    group: int,
):
    cols = [c for _, c in shapes]
    regions = regions_of([0, 0, 1], offsets, shapes, strides)
    out_regions = regions_of([0, -1, 1], [0, 0, out_offset], shapes, cols)
    grads: list[torch.Tensor | None] = [randn(60), randn(8000, seed=1)]
    mu = [0.9, 0.95, 0.5]
    momenta, outs, results = [], [], []
    for launch in (elementwise.pack, elementwise.launch_pack):
        momenta, outs = [randn(60, seed=2), randn(8000, seed=3)], [torch.zeros(40), torch.zeros(7400)]
        outs = [each.to(wire) for each in outs]
        launch(grads, momenta, outs, regions, out_regions, mu, nesterov)
        launch([None, grads[1]], momenta, outs, regions, out_regions, mu, nesterov)
        results.append((*momenta, *outs))
    for slow, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-3 if wire == torch.float16 else 1e-6, atol=1e-6)
    assert (
        elementwise.group(
            regions, out_regions, torch.stack([regions.addresses(momenta), out_regions.addresses(outs)])
        )
        == group
    )
    back = regions_of([0, 0, 1], [0, 24, out_offset], shapes, cols)
    results = []
    for launch in (elementwise.apply, elementwise.launch_apply):
        weights = [randn(60, seed=4), randn(8000, seed=5)]
        launch(
            weights,
            regions,
            [randn(40, seed=6).to(wire), randn(7400, seed=7).to(wire)],
            back,
            [0.9, 1.0, 0.5],
            mu,
        )
        results.append(weights)
    for slow, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-6)
    results = []
    for launch in (elementwise.copy, elementwise.launch_copy):
        targets = [torch.zeros(60, dtype=wire), torch.zeros(8000, dtype=wire)]
        launch([randn(40, seed=6).to(wire), randn(7400, seed=7).to(wire)], back, targets, regions)
        results.append(targets)
    assert all(torch.equal(slow, fast) for slow, fast in zip(*results, strict=True))
