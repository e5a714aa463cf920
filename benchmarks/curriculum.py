"""How many groups have a gradient: weighted draws against even ones, for a simulated learner.

    python benchmarks/curriculum.py [--seeds 10] [--steps 60,100,200]

No model: skill against difficulty, on a pool that is skewed (65% of the tasks out of reach, 20% long solved), and tasks
that tell nothing about their difficulty beforehand. Both samplers meet the same tasks with the same luck. Bar: 1.3
times the informative groups of even sampling, lower end of the 95% interval over seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from learner import informative_share, practise  # pyright: ignore[reportMissingImports]

from woodshed.curriculum import CurriculumSettings
from woodshed.runs import machine

BAR = 1.3
T_95 = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 19: 2.093}
"""Student's t by degrees of freedom."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Weighted against even draws, for a simulated learner.")
    parser.add_argument("--seeds", type=int, default=10, choices=[n + 1 for n in T_95])
    parser.add_argument("--steps", default="60,100,200")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "curriculum.json")
    options = parser.parse_args()
    rows = [compare(int(steps), options.seeds) for steps in options.steps.split(",")]
    print(
        f"{'steps':>6}{'even':>8}{'weighted':>10}{'ratio [95%]':>22}{'skill even':>12}{'weighted':>10}{'ms a draw':>11}"
    )
    for row in rows:
        low, high = row["interval"]
        ratio = f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]"
        print(
            f"{row['steps']:>6}{row['even']:>8.3f}{row['weighted']:>10.3f}{ratio:>22}{row['skill_even']:>12.2f}"
            f"{row['skill_weighted']:>10.2f}{row['draw_ms']:>9.1f}{'' if low >= BAR else '  MISSED'}"
        )
    report = {"rows": rows, "seeds": options.seeds, "machine": machine.describe()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


def compare(steps: int, seeds: int) -> dict[str, Any]:
    shares, skills, seconds = [], [], 0.0
    for seed in range(seeds):
        began = time.process_time()
        weighted, after = practise(CurriculumSettings(repeats=True), seed=seed, steps=steps)
        seconds += time.process_time() - began
        even, after_even = practise(CurriculumSettings(kind="even", repeats=True), seed=seed, steps=steps)
        shares.append((informative_share(even), informative_share(weighted)))
        skills.append((after_even["skill"], after["skill"]))
    ratios = np.array([b / a for a, b in shares])
    half = T_95[seeds - 1] * float(ratios.std(ddof=1)) / seeds**0.5
    return {
        "steps": steps,
        "even": float(np.mean([a for a, _ in shares])),
        "weighted": float(np.mean([b for _, b in shares])),
        "ratio": float(ratios.mean()),
        "interval": [float(ratios.mean()) - half, float(ratios.mean()) + half],
        "skill_even": float(np.mean([a for a, _ in skills])),
        "skill_weighted": float(np.mean([b for _, b in skills])),
        "draw_ms": 1000 * seconds / seeds / steps,
    }


if __name__ == "__main__":
    main()
