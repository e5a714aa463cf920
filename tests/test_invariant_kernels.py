"""The kernels of attention and products against torch, by Triton's interpreter (`conftest`). Skipped without Triton."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton")

from woodshed.engines.local import invariant, kernels

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU: TRITON_INTERPRET=1 pytest " + __file__
    ),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_attention_kernel():
    for width, groups in ((64, 2), (20, 1)):
        query, key, value = (randn(2, h, 90, width, seed=h) for h in (4, groups, groups))
        zero = torch.zeros(2, 2, dtype=torch.long)
        ours = kernels.attend(query, key, value, zero, 0.2)
        plain = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=0.2)
        torch.testing.assert_close(ours, plain.transpose(1, 2))
        moved = torch.zeros(2, groups, 128, width)
        moved[:, :, 10:100] = key
        late = kernels.attend(query[:, :, 80:], moved, moved, torch.tensor([[10, 90], [10, 90]]), 0.2)
        same = kernels.attend(query, key, key, zero, 0.2)
        if late.is_cuda:
            assert torch.equal(late, same[:, 80:])
        else:  # the interpreter's products are numpy's, whose order of sums is its BLAS library's
            torch.testing.assert_close(late, same[:, 80:], rtol=1e-6, atol=1e-6)
        roomy = kernels.attend(query, key, value, zero, 0.2, extra=3)
        assert roomy.shape[1] == 93 and torch.equal(roomy[:, :90], ours)


def test_gradients_of_branching_attention(monkeypatch):
    monkeypatch.setattr(invariant, "_has_kernel", lambda query, value: True)
    query, key, value = inputs = [randn(2, h, 40, 16, seed=h).requires_grad_() for h in (4, 2, 2)]
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    mask[-5:, 20:35] = False
    ours = invariant.attend_branching(None, query, key, value, mask[-5:].expand(2, 1, -1, -1))
    plain = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(ours, plain)
    weight = randn(*plain.shape, seed=5)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((plain * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_product_kernel():
    x, weight, bias = randn(3, 50, 300), randn(70, 300, seed=1), randn(70, seed=2)
    for given in (bias, None):
        plain = torch.nn.functional.linear(x, weight, given)
        torch.testing.assert_close(kernels.linear(x, weight, given), plain, rtol=1e-4, atol=1e-4)
