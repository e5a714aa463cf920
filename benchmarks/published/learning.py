"""Tables on the effect of practice."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from published.write import interval, judged, load, percent, points, table
from woodshed.feedback.gate import GateMeasurement, why_not

FEEDBACK = "RL + targeted feedback"


def _pooled(name: str, measure: str) -> tuple[float, float]:
    """A measure before and after over all seeds of a variant that began at the long warm-up."""
    runs = [
        run
        for run in load("targeted_feedback")["runs"]
        if run["run"].startswith(f"lit-{name}-") and run["machine"].endswith("ba7def0")
    ]
    sides = [[run["evaluations"][side][measure] for run in runs] for side in (0, -1)]
    before, after = (sum(e["part"] for e in side) / sum(e["whole"] for e in side) for side in sides)
    return before, after


def _figures(name: str) -> dict[str, Sequence[str]]:
    """Measure -> before, after and change of a variant from the short warm-up, as its comparison printed them."""
    by_measure: dict[str, Sequence[str]] = {}
    current = ""
    for variant, _, measure, *figures in load("targeted_feedback")["comparison"]["table"][1:]:
        current = variant or current
        if current == name:
            by_measure[measure] = figures
    return by_measure


LABELS = {"rl": "RL alone", "kl-ema": FEEDBACK, "penalty": "RL + a penalty on the same faults"}


def _short(name: str) -> list[str]:
    variant = _figures(name)
    calls = [text.replace("%", " %") for text in variant["invalid-call rate"]]
    solved = [text.replace("%", " %") for text in variant["solve rate"]]
    return [
        f"{calls[0]} to {calls[1]}",
        calls[2],
        f"{solved[0]} to {solved[1]}",
        f"{variant['mean reward'][0]} to {variant['mean reward'][1]}",
    ]


def _long(name: str) -> list[str]:
    calls, solved, reward = (_pooled(name, key) for key in ("invalid_calls", "solved", "reward"))
    change = load("targeted_feedback_literate")["arms"][name]["invalid_calls"]
    return [
        f"{percent(calls[0])} to {percent(calls[1])}",
        points(change),
        f"{percent(solved[0])} to {percent(solved[1])}",
        f"{reward[0]:.2f} to {reward[1]:.2f}",
    ]


def _quickstart(variant: str) -> list[str]:
    """All runs of a variant of the quickstart: the middle one and the range."""
    runs = [run for run in load("quickstart")["runs"] if run["arm"] == variant]
    calls, seeds = [run["invalid_calls"] for run in runs], len({run["seed"] for run in runs})
    sides = [_middle([rate[side]["value"] for rate in calls]) for side in ("before", "after")]
    changes = [rate["change"] for rate in calls]
    clear = sum(change[2] < 0 for change in changes)
    ends = [f"{100 * end(change[0] for change in changes):+.1f}" for end in (min, max)]
    solved = [sum(run["solved"][column] for run in runs) for column in range(3)]
    return [
        f"{sides[0]} to {sides[1]}, {len(runs)} runs of {seeds} seed{'s' if seeds > 1 else ''}",
        f"{ends[0]} to {ends[1]} pp, clear in {clear} of {len(runs)}",
        f"{solved[0]} to {solved[1]} of {solved[2]}",
        _rewards(runs),
    ]


def _rewards(runs: Sequence[Mapping[str, Any]]) -> str:
    """Mean reward before and after, over the runs that kept it."""
    kept = [run["reward"] for run in runs if "reward" in run]
    if not kept:
        return "not kept"
    first, last = (statistics.mean(side) for side in zip(*kept, strict=True))
    return f"{first:.2f} to {last:.2f} ({len(kept)} run{'s' if len(kept) > 1 else ''})"


def _middle(shares: Sequence[float]) -> str:
    low, high = (f"{100 * end:.0f}" for end in (min(shares), max(shares)))
    return f"{100 * statistics.median(shares):.0f} % ({low} to {high})"


HEADLINE = ["", "invalid-call rate", "change [95 %]", "solve rate", "reward"]


def headline() -> str:
    """The five rows of the README's table."""
    rows = [
        [f"quickstart, {FEEDBACK}", *_quickstart(FEEDBACK)],
        ["quickstart, RL alone", *_quickstart("RL alone")],
        [f"0.5B on a GPU, {FEEDBACK}", *_short("kl-ema")],
        ["0.5B on a GPU, RL alone", *_short("rl")],
        ["0.5B on a GPU, RL + a penalty: **better than feedback here**", *_short("penalty")],
    ]
    return table(HEADLINE, rows)


def quickstart_calls() -> str:
    """Invalid-call rate before and after the quickstart, over its runs."""
    return _quickstart(FEEDBACK)[0].partition(",")[0]


def quickstart_solved() -> str:
    """Solved attempts before and after the quickstart, over its runs."""
    return _quickstart(FEEDBACK)[2]


def quickstart() -> str:
    rows = []
    for run in load("quickstart")["runs"]:
        calls = run["invalid_calls"]
        first, last, total = run["solved"]
        rows.append(
            [
                f"{run['arm']}, seed {run['seed']}, `{run['commit']}`{', a fresh clone' if run['fresh_clone'] else ''}",
                interval(calls["before"]),
                interval(calls["after"]),
                points(calls["change"]),
                f"{first} to {last} of {total}",
            ]
        )
    return table(["run", "invalid calls before", "after", "change", "solved"], rows)


def quickstart_facts() -> str:
    stored = load("quickstart")
    faults, seeds, runs = stored["natural_faults"], stored["seeds_0_and_1_after"], stored["runs"]
    fed = [run for run in runs if run["arm"] == FEEDBACK]
    halved = sum(
        r["invalid_calls"]["after"]["value"] <= r["invalid_calls"]["before"]["value"] / 2 for r in fed
    )
    clear = sum(r["invalid_calls"]["change"][2] < 0 for r in fed)
    more = sum(r["solved"][1] > r["solved"][0] for r in fed)
    planted = "; ".join(
        f"seed {n}: {faults[f'seed {n}'][0]} to {faults[f'seed {n}'][1]} turns" for n in (0, 1)
    )
    return "\n".join(
        [
            f"- With feedback the rate fell by half or more in {halved} of {len(fed)} runs, clearly in {clear}.",
            f"- More tasks were solved in {more} of {len(fed)} runs: nothing shows that it solves more.",
            f"- Two seeds of each variant, after training: RL alone {percent(seeds['RL alone'][0])}, feedback "
            f"{percent(seeds[FEEDBACK][0])}, difference {points(seeds['difference'])}.",
            f"- Faults that the warm-up had not planted, before and after: {planted}. Too few to say.",
        ]
    )


def experiment() -> str:
    stored = load("targeted_feedback_literate")
    rows = []
    for name in ("rl", "kl-ema", "penalty"):
        variant = _figures(name)
        extra = [variant["first message a call fault"][1].replace("%", " %")]
        extra.append(variant["divergence from the start, nats a token"][1])
        rows.append([f"{LABELS[name]}, short warm-up", *_short(name), *extra])
    for name in ("rl", "kl-ema"):
        variant = stored["arms"][name]
        extra = [percent(variant["first_message_fault"]), f"{variant['kl_to_start']:.2f}"]
        rows.append([f"{LABELS[name]}, long warm-up", *_long(name), *extra])
    return table([*HEADLINE, "first message a fault", "nats from the start"], rows)


def against_rl() -> str:
    """The variants' last evaluations less those of RL alone."""
    header, *variants = load("targeted_feedback")["comparison"]["against"]
    keys = [header.index(key) for key in ("invalid-call rate", "solve rate", "mean reward")]
    rows = [[f"{LABELS[variant[0]]}, short warm-up", *(variant[key] for key in keys)] for variant in variants]
    stored = load("targeted_feedback_literate")["against_rl"]["kl-ema"]
    reward = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*stored["reward"])
    rows.append([f"{FEEDBACK}, long warm-up", points(stored["invalid_calls"]), "not kept", reward])
    return table(["after practice, less RL alone", "invalid-call rate", "solve rate", "reward"], rows)


def experiment_bars() -> str:
    """The targets of the experiment, for feedback from the long warm-up."""
    stored = load("targeted_feedback_literate")
    (_, alone), (_, fed) = _pooled("rl", "invalid_calls"), _pooled("kl-ema", "invalid_calls")
    variant, against = stored["arms"]["kl-ema"], stored["against_rl"]["kl-ema"]
    runs = [r for r in load("targeted_feedback")["runs"] if r["run"].startswith("lit-kl-ema-")]
    moved = [run["steps"][-1]["kl_to_start"] for run in runs if run["machine"].endswith("ba7def0")]
    rows = [
        [
            "at most a third of RL alone's rate",
            f"{percent(fed)} of {percent(alone)}",
            judged(fed <= alone / 3),
        ],
        ["at most 5 %", percent(fed), judged(fed <= 0.05)],
        [
            "reward no more than 0.10 below RL alone",
            f"{against['reward'][0]:+.2f}",
            judged(against["reward"][0] > -0.1),
        ],
        [
            "held-out reward at least 0.15 above the start",
            f"{variant['reward'][0]:+.2f}",
            judged(variant["reward"][0] >= 0.15),
        ],
        [
            "first messages that are faults under 10 %",
            percent(variant["first_message_fault"]),
            judged(variant["first_message_fault"] < 0.1),
        ],
        [
            "under 0.3 nats a token from the start, every seed",
            ", ".join(f"{m:.2f}" for m in moved),
            judged(max(moved) < 0.3),
        ],
    ]
    return table(["target", "figure", ""], rows)


OTHER_VARIANTS = {
    "kl-frozen": "frozen teacher",
    "kl-forward": "frozen teacher, forward divergence",
    "kl-live": "live teacher (stopped by the run, rolled back)",
    "kl-alone": "feedback without rewards",
    "hint-naive": "a warm-up without reminders",
    "opsd": "OPSD: every turn, a teacher that read the solution",
    "rl-natural": "no planted faults, RL alone",
    "kl-natural": "no planted faults, feedback",
}


def other_variants() -> str:
    """Other variants from a warm-up of 80 steps; most runs were cut off before their last evaluation."""
    rows = []
    for name, label in OTHER_VARIANTS.items():
        runs = [
            r for r in load("targeted_feedback")["runs"] if r["run"].startswith(f"targeted-feedback-{name}-")
        ]
        last, before, after = [], [], []
        for run in runs:
            ends = [step["invalid_calls"] for step in run["steps"][-3:]]
            last.append(f"{100 * sum(ends) / len(ends):.0f}")
            before.append(percent(run["evaluations"][0]["invalid_calls"]["value"]))
            ended = len(run["evaluations"]) > 1
            after.append(
                percent(run["evaluations"][-1]["invalid_calls"]["value"]) if ended else "not measured"
            )
        rows.append([label, f"{', '.join(last)} %", ", ".join(before), ", ".join(after)])
    header = [
        "variant, by seed",
        "in training, mean of the last three steps",
        "held out before",
        "held out after",
    ]
    return table(header, rows)


GATE = "start-literate, read_before 30, read_lines 40, code_share 0.25, code of spoiled edits masked too"


def gate() -> str:
    """Each class of hints on held-out tasks, by the rule of `woodshed.feedback.gate`."""
    rows = []
    for row in load("hint_gate")["warmups"][GATE]["gate"]:
        measured = GateMeasurement(row["class"], row["turns"], row["gain"], row["lowered"], row["faulty"])
        reason = why_not(measured)
        counts = [str(row["faulty"][side]) for side in ("plain", "hint", "placebo", "wrong")]
        verdict = "too few turns" if reason is None else "passes" if not reason else f"fails: {reason}"
        rows.append([row["class"].replace("_", " "), str(row["turns"]), ", ".join(counts), verdict])
    header = ["class", "turns", "faulty when sampled again: plain, hint, placebo, wrong hint", ""]
    return table(header, rows)
