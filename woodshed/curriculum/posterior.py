"""Posterior of a solve rate p: a Beta(a, b) distribution, its moments and tails. Pure functions."""

from __future__ import annotations

import functools
from math import exp, lgamma, log, log1p, sqrt

STRENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x)) if x > -700 else 0.0


@functools.lru_cache(maxsize=1 << 16)
def informative(a: float, b: float, attempts: int) -> float:
    """Probability that `attempts` attempts do not all have the same result: 1 - E[p^G] - E[(1-p)^G].

    It is the probability that a group has a gradient under a group-mean baseline (DAPO's dynamic sampling keeps just
    these groups, arXiv 2503.14476).
    """
    same = exp(_moment(a, b, attempts)) + exp(_moment(b, a, attempts))
    return max(0.0, 1.0 - same)


def deviation(a: float, b: float) -> float:
    """Standard deviation of p."""
    return sqrt(a * b / (a + b + 1)) / (a + b)


@functools.lru_cache(maxsize=1 << 16)
def below(x: float, a: float, b: float) -> float:
    """P(p < x): the regularised incomplete beta function, by its continued fraction (Lentz's method, DLMF 8.17.22)."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - below(1 - x, b, a)
    front = exp(a * log(x) + b * log1p(-x) + lgamma(a + b) - lgamma(a) - lgamma(b)) / a
    return front * _fraction(x, a, b)


def level_offset(observed: list[tuple[float, float, float]]) -> float:
    """The c of p = sigmoid(c - difficulty) for which the predicted and the observed number of solves agree.

    Args:
        observed: difficulty, attempts and solves of each attempted task.

    One pseudo-attempt pulls c towards 0, which decides if nothing was attempted.
    """
    c = 0.0
    for _ in range(12):  # Newton's method: the sum is smooth and rises everywhere
        rates = [(sigmoid(c - d), n) for d, n, _ in observed] + [(sigmoid(c), 1.0)]
        excess = sum(p * n for p, n in rates) - sum(k for _, _, k in observed) - 0.5
        slope = sum(p * (1 - p) * n for p, n in rates)
        step = max(-2.0, min(2.0, excess / max(slope, 1e-9)))
        c = max(-12.0, min(12.0, c - step))
        if abs(step) < 1e-9:
            break
    return c


def prior_strength(observed: list[tuple[float, float, float]], offset: float) -> float:
    """Strength of the prior in attempts: the most likely of STRENGTHS, given the observations (empirical Bayes).

    If tasks are either never or always solved, rates are far from the prediction, and a weak prior fits better. The
    likelihood of each task's counts is beta-binomial; STRENGTHS[-2] is favoured a little, so that it is the result
    after few attempts.
    """
    best, likeliest = STRENGTHS[-2], -1e300
    for strength in STRENGTHS:
        total = 0.0 if strength == STRENGTHS[-2] else -2.0
        for d, n, k in observed:
            a, b = strength * sigmoid(offset - d) + 1e-9, strength * sigmoid(d - offset) + 1e-9
            total += (
                lgamma(a + k) + lgamma(b + n - k) - lgamma(a + b + n) + lgamma(a + b) - lgamma(a) - lgamma(b)
            )
        if total > likeliest:
            best, likeliest = strength, total
    return best


def _moment(a: float, b: float, power: int) -> float:
    """log E[p^power]."""
    return lgamma(a + power) - lgamma(a) + lgamma(a + b) - lgamma(a + b + power)


def _fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    d = 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    c, value = 1.0, d
    for m in range(1, 400):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        step = 1.0
        for term in (even, odd):
            d = 1 + term * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            step = c * d
            value *= step
        if abs(step - 1) < 1e-12:
            break
    return value
