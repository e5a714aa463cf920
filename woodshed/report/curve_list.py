"""Curves of a page: their titles, the metrics they show, and a sentence on what each says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "score", ""]
"""Shares and scores lie between 0 and 1, and so do their axes; a share is written in percent."""


@dataclass(frozen=True)
class Curve:
    """A chart of named metrics of one phase."""

    title: str
    phase: str
    metrics: Mapping[str, str]
    """Metric to the name of its line; one that no run has is left out."""
    meaning: str
    unit: Unit = ""


@dataclass(frozen=True)
class CurveFamily:
    """A chart with a line for every training metric whose name begins alike."""

    title: str
    prefix: str
    missing: float | None
    """Value at steps without the metric; None leaves them out."""
    meaning: str
    unit: Unit = ""


HELD_OUT = "On the tasks that are held out from training."
CURVES = (
    Curve("invalid-call rate, held out", "eval", {"invalid_calls": ""}, HELD_OUT, unit="share"),
    Curve("solve rate, held out", "eval", {"solved": ""}, HELD_OUT, unit="share"),
    Curve("mean reward, held out", "eval", {"reward": ""}, HELD_OUT, unit="score"),
    Curve("mean reward", "train", {"reward": ""}, "Of the attempts at the tasks of each step.", unit="score"),
    Curve(
        "invalid-call rate",
        "train",
        {"invalid_calls": ""},
        "Share of the messages of each step's attempts that call a tool wrongly.",
        unit="share",
    ),
    Curve(
        "rollouts with any call fault",
        "train",
        {"faulty_rollouts": ""},
        "Share of each step's attempts with at least one such message.",
        unit="share",
    ),
    Curve(
        "effort: sampled tokens a rollout",
        "train",
        {"tokens": ""},
        "Tokens that the policy writes in an attempt.",
    ),
    Curve("effort: turns a rollout", "train", {"turns": ""}, "Messages of the policy in an attempt."),
    Curve(
        "targeted divergence",
        "train",
        {"kl_loss": ""},
        "Distance between the policy and itself after a hint, on the hinted turns: what targeted feedback lowers.",
    ),
    Curve(
        "gradient norms",
        "train",
        {"rl_grad_norm": "policy gradient", "kl_grad_norm": "targeted"},
        "Lengths of the two gradients of a step before they are added.",
    ),
    Curve(
        "divergence from the start, nats a token",
        "train",
        {"kl_to_start": ""},
        "How far the policy has moved from its first weights.",
    ),
    Curve(
        "entropy, nats a token",
        "train",
        {"entropy": ""},
        "How undecided the policy is about its next token; near 0 it always writes the same.",
    ),
    Curve(
        "sampler against trainer, gap",
        "train",
        {"logp_gap_mean": "mean", "logp_gap_max": "largest of one token"},
        "Difference between the log-probs of the engine that sampled and of the trainer: noise of the numerics.",
    ),
    Curve(
        "age of tokens, steps",
        "train",
        {"staleness_mean": "mean", "staleness_max": "oldest"},
        "Steps between the weights that wrote a token and the step that learned from it.",
    ),
    Curve(
        "drift, nats a token",
        "train",
        {"drift_mean": ""},
        "How far the policy has moved since older weights wrote the tokens that it learns from.",
    ),
    Curve(
        "waits, seconds",
        "train",
        {"waits trainer_s": "trainer for attempts", "waits admission_s": "attempts for weights"},
        "Seconds that the trainer had nothing to learn from, and in which no further attempt was admitted.",
    ),
    Curve(
        "tasks that an earlier step had drawn",
        "train",
        {"repeated_tasks": ""},
        "Tasks of a step on which the policy was trained before.",
    ),
    Curve(
        "seconds a step",
        "train",
        {"seconds attempts": "attempts", "seconds update": "update"},
        "Wall time of the two halves of a step.",
    ),
    Curve("sft: loss, nats a token", "sft", {"sft_loss": ""}, "Surprise at the attempts that are imitated."),
    Curve(
        "distillation: divergence",
        "distill",
        {"kl_loss": ""},
        "Distance from the policy that has read a demonstration.",
    ),
    Curve(
        "distillation: log-prob of demonstrations, nats a token",
        "distill",
        {"demonstrated_logp": "learned from", "earlier_logp": "earlier ones"},
        "Of demonstrations it learns from now, and of earlier answers, which show what it forgets.",
    ),
)

FAMILIES = (
    CurveFamily(
        "invalid calls by fault, share of turns",
        "faults ",
        0.0,
        "Share of the policy's messages with each kind of call fault.",
        unit="share",
    ),
    CurveFamily(
        "tasks of the pool by state",
        "curriculum ",
        None,
        "Tasks by what is known of how often they are solved.",
    ),
    CurveFamily("cost", "cost ", None, "In the currency of the run's price table."),
    CurveFamily(
        "auxiliary rewards and effort, mean a rollout",
        "reward_terms ",
        None,
        "What is added to the reward of the tests.",
    ),
)
