"""How often the 95% intervals of `woodshed.evals.statistics` hold the truth, in simulation.

Tasks have solve rates of their own (beta distributed, spread or alike), attempts are drawn from them. Three kinds of
rows: a solve rate; its change, paired by task; the change between two arms of several training seeds each. The column
"nested" is the hierarchical percentile bootstrap (tasks, then attempts inside each drawn task), for comparison.

    python benchmarks/interval_coverage.py [--trials 2000] [--effect 0.8]

Bar: 93% to 97% in rows with at least five expected tasks with and without success. So many trials tell it within some
points (three standard errors of 2000 are 1.5), so a row outside is counted anew with four times as many other trials,
and that figure stands; the first one is kept beside it. With rarer events the interval may hold more often.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy as np

from woodshed.evals import statistics
from woodshed.evals.statistics import Sums
from woodshed.runs import machine

TASKS = (30, 60, 120, 250, 500)
ATTEMPTS = (1, 4)
RATES = (0.05, 0.1, 0.2, 0.5, 0.8)
SPREADS = (1.0, 6.0)  # of the beta distribution: most tasks near 0 or 1; most near the mean
SEEDS = (2, 3, 5)
SEED_SPREAD = 0.04  # standard deviation of a training seed's effect on every task
NESTED_RESAMPLES = 300
FEWEST = 5  # expected tasks with (or without) a success, below which events count as rare


def holds(low: float | None, high: float | None, truth: float) -> bool:
    return low is not None and high is not None and low <= truth <= high


def draw(rng: np.random.Generator, rate_N: np.ndarray, attempts: int) -> Sums:
    return {i: (float(c), float(attempts)) for i, c in enumerate(rng.binomial(attempts, rate_N))}


def estimate(side: Sums) -> statistics.Estimate:
    return statistics.rate([p for p, _ in side.values()], [w for _, w in side.values()], list(side))


def nested(rng: np.random.Generator, side: Sums) -> tuple[float, float]:
    """Tasks drawn with replacement, then each one's attempts with replacement: a binomial draw at its own rate."""
    solved_N = np.array([part for part, _ in side.values()])
    attempts = int(next(iter(side.values()))[1])
    drawn_BN = solved_N[rng.integers(0, len(solved_N), (NESTED_RESAMPLES, len(solved_N)))]
    means_B = (rng.binomial(attempts, drawn_BN / attempts) / attempts).mean(1)
    low, high = np.quantile(means_B, [0.025, 0.975])
    return float(low), float(high)


def one_policy(
    num_tasks: int,
    attempts: int,
    rate: float,
    spread: float,
    trials: int,
    effect: float = 0.8,
    draw_of: int = 0,
) -> dict[str, float]:
    """Shares of trials in which the intervals of a rate and of its change held the truth.

    The second side solves each task at `effect` times its rate.
    """
    rng = np.random.default_rng([num_tasks, attempts, round(100 * rate), round(spread), draw_of])
    hits = dict.fromkeys(("rate", "nested", "change"), 0)
    for _ in range(trials):
        rate_N = rng.beta(spread * rate, spread * (1 - rate), num_tasks)
        before, after = draw(rng, rate_N, attempts), draw(rng, effect * rate_N, attempts)
        found, change = estimate(before), statistics.difference(before, after, is_share=True)
        hits["rate"] += holds(found.low, found.high, rate)
        hits["nested"] += holds(*nested(rng, before), rate)
        hits["change"] += holds(change.low, change.high, (effect - 1) * rate)
    return {name: count / trials for name, count in hits.items()}


def two_arms(num_tasks: int, attempts: int, seeds: int, seed_spread: float, trials: int) -> float:
    """Share of trials in which the interval between two arms held the true difference of 5 points."""
    rng = np.random.default_rng([num_tasks, attempts, seeds, round(1000 * seed_spread)])
    hits = 0
    for _ in range(trials):
        rate_N = rng.uniform(0.2, 0.7, num_tasks)
        sides = [
            [
                draw(rng, np.clip(rate_N + gain + rng.normal(0, seed_spread), 0, 1), attempts)
                for _ in range(seeds)
            ]
            for gain in (0.0, 0.05)
        ]
        change = statistics.difference_over_seeds(*sides, is_share=True)
        hits += holds(change.low, change.high, 0.05)
    return hits / trials


def inside(share: float) -> bool:
    return 0.93 <= share <= 0.97


def is_usual(tasks: float, mean: float) -> bool:
    """At least `FEWEST` expected tasks with and without success."""
    return tasks * min(mean, 1 - mean) >= FEWEST


def judge(rows: list[dict[str, float]]) -> None:
    """Say whether the bar holds."""
    for name in ("rate", "change", "arms"):
        held = {True: [], False: []}
        for row in (row for row in rows if name in row):
            held[is_usual(row["tasks"], row.get("mean", 0.5))].append(row[name])
        for usual, shares in held.items():
            if shares:
                kind = "usual" if usual else "rare events"
                print(
                    f"{name}, {kind}: {min(shares):.3f} to {max(shares):.3f}, mean {np.mean(shares):.3f}; "
                    f"{sum(map(inside, shares))} of {len(shares)} rows between 93% and 97%"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="Coverage of 95% intervals.")
    parser.add_argument("--trials", type=int, default=2000, help="simulated suites per row")
    parser.add_argument("--effect", type=float, default=0.8, help="what a change multiplies every rate with")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "interval_coverage.json"
    )
    options = parser.parse_args()
    rows: list[dict[str, float]] = []
    print(f"{'tasks':>6}{'attempts':>9}{'rate':>6}{'spread':>7}{'solve rate':>12}{'change':>8}{'nested':>8}")
    for num_tasks, attempts, rate, spread in itertools.product(TASKS, ATTEMPTS, RATES, SPREADS):
        row = (num_tasks, attempts, rate, spread)
        found = one_policy(*row, options.trials, options.effect)
        if is_usual(num_tasks, rate) and not (inside(found["rate"]) and inside(found["change"])):
            first = {f"first_{name}": found[name] for name in ("rate", "change")}
            found = one_policy(*row, 4 * options.trials, options.effect, draw_of=1) | first
        rows.append({"tasks": num_tasks, "attempts": attempts, "mean": rate, "spread": spread, **found})
        print(
            f"{num_tasks:>6}{attempts:>9}{rate:>6}{spread:>7}{found['rate']:>12.3f}{found['change']:>8.3f}"
            f"{found['nested']:>8.3f}",
            flush=True,
        )
    print(f"{'tasks':>6}{'seeds':>9}{'seed sd':>9}{'arms':>8}")
    for num_tasks, seeds, spread in itertools.product((30, 120, 500), SEEDS, (0.0, SEED_SPREAD)):
        held = two_arms(num_tasks, 2, seeds, spread, options.trials)
        rows.append({"tasks": num_tasks, "attempts": 2, "seeds": seeds, "seed_spread": spread, "arms": held})
        print(f"{num_tasks:>6}{seeds:>9}{spread:>9}{held:>8.3f}", flush=True)
    judge(rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"trials": options.trials, "effect": options.effect, "rows": rows, "machine": machine.describe()}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
