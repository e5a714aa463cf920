"""Which norm the targeted gradient may have, on a toy where everything is exact: an ablation, not a speed figure.

    python benchmarks/gradient_cap.py [--seeds 10]

A softmax policy over six actions, linear in random features: action 0 is a call fault, action 1 solves the task, the
others do neither. RL is REINFORCE with a group mean over 6 tasks x 4 attempts; the targeted term is the reverse KL to a
frozen teacher at the contexts where the fault was drawn. AdamW with betas (0.9, 0.95), as in training.

Situations: `sparse`, where solving is rare, so most steps have no spread and no policy gradient; `late`, where there is
none at all in the first ten steps; `dense`; and `harmful`, a dense one whose teacher was made wrong by its hint (it
errs more): there the cap must protect. Rules: `running`, the norm of the steps that had a policy gradient, and
max_grad_norm before the first of them (in use); `floor`, never below a tenth of max_grad_norm; `spread`, the running
norm divided by the share of groups with spread, as if all had had some; `none`.

Reported: fault rate and solve rate after 40 steps, mean over seeds, and the standard error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from woodshed.learning.grad_norms import GradNorms
from woodshed.learning.loss_settings import FeedbackSettings
from woodshed.runs import machine

ACTIONS, FEATURES, TASKS, ATTEMPTS, STEPS = 6, 24, 6, 4, 40
FAULT, SOLVE = 0, 1
RATE, MAX_NORM = 0.03, 1.0
RULES = ("running", "floor", "spread", "none")
SITUATIONS = {  # logit of solving, first step at which it can be rewarded, whether the teacher is wrong
    "sparse": (-3.5, 0, False),
    "late": (-1.0, 10, False),
    "dense": (0.0, 0, False),
    "harmful": (0.0, 0, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Rules for the cap of the targeted gradient.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gradient_cap.json")
    options = parser.parse_args()
    rows = []
    print(f"{'situation':<12}{'rule':<10}{'fault rate':>18}{'solve rate':>18}{'steps with RL':>15}")
    for situation in SITUATIONS:
        for rule in RULES:
            row = {"situation": situation, "rule": rule, **summary(situation, rule, options.seeds)}
            rows.append(row)
            figures = "".join(f"{row[k]:>11.3f} +-{row[k + '_se']:.3f}" for k in ("fault", "solve"))
            print(f"{situation:<12}{rule:<10}{figures}{row['with_rl']:>15.1f}")
    report = {"rows": rows, "seeds": options.seeds, "machine": machine.describe()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


def summary(situation: str, rule: str, seeds: int) -> dict[str, float]:
    runs = np.array([run(situation, rule, seed) for seed in range(seeds)])
    means, errors = runs.mean(0), runs.std(0, ddof=1) / np.sqrt(seeds)
    return {
        "fault": means[0],
        "fault_se": errors[0],
        "solve": means[1],
        "solve_se": errors[1],
        "with_rl": means[2],
    }


def run(situation: str, rule: str, seed: int) -> tuple[float, float, float]:
    """(fault rate, solve rate, steps that had a policy gradient) after training."""
    solve_logit, first_reward, is_wrong = SITUATIONS[situation]
    rng = np.random.default_rng(seed)
    # One feature is common to all contexts, as the weights of a language model are; it carries the start.
    start = np.zeros((ACTIONS, FEATURES))
    start[FAULT, 0], start[SOLVE, 0] = 0.5, solve_logit
    weights, first, second = start.copy(), np.zeros_like(start), np.zeros_like(start)
    scale, with_rl = GradNorms(), 0
    feedback = FeedbackSettings()
    share = 1.0
    for step in range(STEPS):
        contexts = context(rng, TASKS)
        rl, kl, informative = gradients(weights, start, contexts, rng, step >= first_reward, is_wrong)
        rl_norm = float(np.linalg.norm(rl))
        if rl_norm:
            with_rl += 1
            share += (informative - share) / min(with_rl, 4)
        scale.observe(rl_norm, float(np.linalg.norm(kl)))
        gradient = rl + factor(rule, scale, feedback, share) * kl
        gradient *= min(1.0, MAX_NORM / max(float(np.linalg.norm(gradient)), 1e-12))
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        corrected = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.95 ** (step + 1))
        weights -= RATE * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
    p = softmax(context(np.random.default_rng(10_000), 400) @ weights.T)
    return float(p[:, FAULT].mean()), float(p[:, SOLVE].mean()), float(with_rl)


def factor(rule: str, scale: GradNorms, feedback: FeedbackSettings, share: float) -> float:
    """What the targeted gradient is multiplied with."""
    if rule == "running":
        return scale.factor(feedback, otherwise=MAX_NORM)
    cap = scale.rl_norm if scale.steps else MAX_NORM
    if rule == "floor":
        cap = max(cap, 0.1 * MAX_NORM)
    if rule == "spread":
        cap /= share
    if rule == "none":
        return 1.0
    return min(1.0, cap / scale.kl_last) if scale.kl_last else 0.0


def context(rng: np.random.Generator, count: int) -> np.ndarray:
    features = rng.normal(size=(count, FEATURES)) / np.sqrt(FEATURES)
    features[:, 0] = 1.0
    return features


def gradients(
    weights: np.ndarray,
    start: np.ndarray,
    contexts: np.ndarray,
    rng: np.random.Generator,
    is_rewarded: bool,
    is_wrong: bool,
) -> tuple[np.ndarray, np.ndarray, float]:
    """(policy gradient, targeted gradient, share of groups with spread)."""
    rl, kl, targets, informative = np.zeros_like(weights), np.zeros_like(weights), 0, 0
    for features in contexts:
        p = softmax(weights @ features)
        drawn = rng.choice(ACTIONS, size=ATTEMPTS, p=p)
        rewards = (drawn == SOLVE).astype(float) * is_rewarded
        informative += bool(np.ptp(rewards))
        for action, advantage in zip(drawn, rewards - rewards.mean(), strict=True):
            rl -= advantage * np.outer(np.eye(ACTIONS)[action] - p, features) / (TASKS * ATTEMPTS)
            if action == FAULT:
                hinted = start @ features
                hinted[FAULT] += 3.0 if is_wrong else -4.0
                log_ratio = np.log(p) - np.log(softmax(hinted))
                kl += np.outer(p * (log_ratio - p @ log_ratio), features)
                targets += 1
    return rl, kl / max(targets, FeedbackSettings().target_floor), informative / TASKS


def softmax(logits: np.ndarray) -> Any:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


if __name__ == "__main__":
    main()
