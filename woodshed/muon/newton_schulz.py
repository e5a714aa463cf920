"""Newton-Schulz: a matrix to (nearly) its orthogonal factor U V^T, by products only.

    X <- X / ||X||_F,   then `steps` times   X <- (a + b X X^T + c (X X^T)^2) X

Source: Jordan et al. 2024 (Muon) for the quintic form and its coefficients; Amsel et al. 2025 (Polar Express, arXiv
2505.16932) for coefficients that change with the step; Zhang, Amsel, Chen and Dao 2026 (tridao.me/blog/2026/
gram-newton-schulz) for the Gram form: the polynomials act on X X^T alone, which for wide matrices is far smaller, and
are multiplied into X at the end of every few steps.

Shapes: a batch is (B, r, c); m is the shorter side, n the longer one. Wide and tall batches give the same numbers
transposed: products run on the shorter side either way, without moving anything.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from woodshed.muon.errors import MuonError

Triple = tuple[float, float, float]
Backend = Literal["auto", "standard", "symmetric", "gram"]

JORDAN: Triple = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
"""Optimal for singular values in [1e-3, 1]; the last one is repeated."""
POLAR_EXPRESS_SAFETY = 1.02
"""Singular values are taken as this much larger, so that rounding does not push one beyond 1, where it would grow."""
GRAM_RESTARTS = (2,)
"""Steps of the Gram form before which the polynomials are multiplied into X: rounding in X X^T makes eigenvalues below
zero, which would else be raised to high powers. The authors' choice for five steps."""
GRAM_HALF = torch.float16
"""Type that the Gram form uses for bfloat16: entries are at most 1, so digits matter and range does not."""
SYMMETRIC_MIN_SIDE = 1024
"""Shorter side from which half of a symmetric product outweighs what the library's own kernel does better."""
TINY = 1e-38


@dataclass(frozen=True)
class NewtonSchulz:
    """Settings of the orthogonalisation; calling it returns a new batch of the same shape in `dtype`."""

    coefficients: Literal["jordan", "polar_express"] | tuple[Triple, ...] = "jordan"
    """A named set, or (a, b, c) for each step; the last one is repeated."""
    steps: int = 5
    """Iterations."""
    dtype: torch.dtype = torch.bfloat16
    """Of the products. The norm is taken in float32. The Gram form has float16 in bfloat16's place."""
    backend: Backend = "auto"
    """"standard" library products; "symmetric" computes half of X X^T and of its square (Triton); "gram" works on
    X X^T; "auto" is what `fastest` says on a GPU, and "standard" on a CPU."""
    triples: tuple[Triple, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise MuonError(f"steps={self.steps}: Newton-Schulz needs at least one; 5 is usual.")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise MuonError(f"dtype={self.dtype}: use bfloat16 (usual), float16, float32 or float64.")
        object.__setattr__(self, "triples", triples(self.coefficients, self.steps))

    def __call__(self, batch: Tensor, out: Tensor | None = None) -> Tensor:
        """(B, r, c) to (B, r, c). A matrix of zeros stays zero; one with NaN or Inf becomes zero.

        `out` receives the result in its own type, and may be `batch`.
        """
        m, n = sorted(batch.shape[-2:])
        backend = self.backend
        if backend == "auto":
            backend = fastest(m, n, has_triton()) if batch.is_cuda else "standard"
        elif backend == "gram" and m == n:
            backend = "standard"  # no gain for squares, and the worst rounding
        is_gram = backend == "gram"
        dtype = GRAM_HALF if is_gram and self.dtype == torch.bfloat16 else self.dtype
        x = normalised(batch, dtype)
        is_tall = x.shape[-2] > x.shape[-1]
        wide = x.mT if is_tall else x
        into = out if out is not None and out.dtype == dtype else None
        into = into.mT if into is not None and is_tall else into
        result = (
            gram(wide, self.triples, out=into)
            if is_gram
            else standard(wide, self.triples, backend == "symmetric", out=into)
        )
        result = result.mT if is_tall else result
        if out is None or into is not None:
            return result
        return out.copy_(result)

    def scratch_bytes(self, rows: int, cols: int) -> int:
        """Temporaries for one unit: X twice, and three products of the shorter side."""
        m, n = sorted((rows, cols))
        return (2 * m * n + 4 * m * m) * self.dtype.itemsize


def triples(coefficients: str | tuple[Triple, ...], steps: int) -> tuple[Triple, ...]:
    if coefficients == "jordan":
        return (JORDAN,) * steps
    if coefficients == "polar_express":
        s = POLAR_EXPRESS_SAFETY
        listed = tuple((a / s, b / s**3, c / s**5) for a, b, c in POLAR_EXPRESS[:-1]) + POLAR_EXPRESS[-1:]
    elif isinstance(coefficients, str) or not coefficients or any(len(each) != 3 for each in coefficients):
        raise MuonError(f'coefficients={coefficients!r}: use "jordan", "polar_express" or ((a, b, c), ...).')
    else:
        listed = tuple(coefficients)
    return (listed + listed[-1:] * steps)[:steps]


def fastest(m: int, n: int, symmetric: bool) -> Literal["standard", "symmetric", "gram"]:
    """The form with fewest FLOPs on a GPU, for five steps and a restart; `symmetric`: Triton is there.

    Library products: 20 m^2 n + 10 m^3 against 8 m^2 n + 28 m^3 of the Gram form, equal at n = 1.5 m. With half of
    every symmetric product: 15 m^2 n + 5 m^3 against 6 m^2 n + 14 m^3, equal at n = m.
    """
    if symmetric and m >= SYMMETRIC_MIN_SIDE:
        return "gram" if n > m else "symmetric"
    return "gram" if 2 * n > 3 * m else "standard"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def normalised(batch: Tensor, dtype: torch.dtype) -> Tensor:
    """Every matrix over its Frobenius norm, which is taken in float32 after an exact scaling by a power of two.

    Without the scaling, squares of entries below 1e-19 underflow; the usual 1e-7 beside the norm shrinks the update of
    rarely used experts silently.
    """
    if batch.is_cuda and has_triton():
        from woodshed.muon import kernels

        return kernels.normalised(batch, dtype)
    largest = torch.linalg.vector_norm(batch, ord=float("inf"), dim=(-2, -1), keepdim=True).float()
    usable = torch.isfinite(largest) & (largest > 0)
    exponent = torch.frexp(torch.where(usable, largest, torch.ones_like(largest))).exponent
    scaled = torch.ldexp(batch.float(), -exponent)
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
    return torch.where(usable, scaled / norm, 0.0).to(dtype)


def standard(
    x: Tensor, triples: tuple[Triple, ...], symmetric: bool = False, out: Tensor | None = None
) -> Tensor:
    """x (B, m, n), m <= n, normalised; `out` is no memory of x."""
    for step, (a, b, c) in enumerate(triples, 1):
        gram = product(x, x, symmetric=symmetric)
        inner = product(gram, gram, gram, alpha=c, beta=b, symmetric=symmetric)
        x = polynomial(inner, x, a, out if step == len(triples) else None)
    return x


def gram(
    x: Tensor,
    triples: tuple[Triple, ...],
    restarts: tuple[int, ...] = GRAM_RESTARTS,
    out: Tensor | None = None,
) -> Tensor:
    """Standard form evaluated on the m x m side. The polynomials commute, so every product is symmetric.

    With P = a + b G + c G^2 a step is X <- P X, hence G <- P G P. Before the steps in `restarts` the collected product
    goes into X, and G is computed anew.
    """
    symmetric = x.is_cuda and x.shape[-2] >= SYMMETRIC_MIN_SIDE and has_triton()
    for start, stop in itertools.pairwise([0, *(r for r in restarts if r < len(triples)), len(triples)]):
        g = product(x, x, symmetric=symmetric)
        collected = p = shifted(g, triples[start], symmetric)
        for triple in triples[start + 1 : stop]:
            g = product(product(p, g, symmetric=symmetric), p, symmetric=symmetric)
            p = shifted(g, triple, symmetric)
            collected = product(collected, p, symmetric=symmetric)
        x = polynomial(collected, x, 0.0, out if stop == len(triples) else None)
    return x


def shifted(g: Tensor, triple: Triple, symmetric: bool) -> Tensor:
    """P = a + b G + c G^2."""
    a, b, c = triple
    p = product(g, g, g, alpha=c, beta=b, symmetric=symmetric)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p


def polynomial(inner: Tensor, x: Tensor, a: float, out: Tensor | None = None) -> Tensor:
    """inner x + a x. A tall batch, seen transposed, stays as it lies in memory: no transposing copy at the end."""
    if x.stride(-1) == 1:
        return torch.baddbmm(x, inner, x, beta=a, out=out)
    out = None if out is None else out.mT
    return torch.baddbmm(x.mT, x.mT, inner.mT, beta=a, out=out).mT


def product(
    x: Tensor, y: Tensor, z: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0, symmetric: bool
) -> Tensor:
    """alpha x y^T + beta z, for products that are symmetric; `symmetric` computes one half and mirrors it."""
    if symmetric:
        from woodshed.muon import kernels

        return kernels.symmetric_product(x, y, z, alpha, beta)
    if z is None:
        return torch.bmm(x, y.mT)
    return torch.baddbmm(z, x, y.mT, alpha=alpha, beta=beta)
