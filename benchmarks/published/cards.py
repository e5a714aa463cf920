"""Blocks on work that is spread over several GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from published.write import judged, load, spread, table

ONE, HALVED, LOADED = "one card", "one card, half micro-batches", "one card, loaded from the ranks"
LAYOUTS = {
    "fsdp": "two cards, weights cut",
    "replicate": "two cards, base whole on both",
    "ep": "two cards, experts dealt out",
}
EXACT = 1e-5


def _is_exact(row: Mapping[str, Any]) -> bool:
    return row["case"].endswith("float32")


def _rows() -> list[Mapping[str, Any]]:
    return load("ranks_step")["rows"]


def ranks_step() -> str:
    """Speed and memory of a step, on one card and over two."""
    rows = []
    for row in _rows():
        if _is_exact(row) or row["layout"] in (HALVED, LOADED):
            continue
        head = [row["case"], LAYOUTS.get(row["layout"], row["layout"])]
        if "error" in row:
            rows.append([*head, row["error"].partition(":")[0], "", "", ""])
            continue
        apart = row.get("distance", {})
        rows.append(
            [
                *head,
                spread(row["tokens_per_s"], 0),
                f"{row['times_one_card']:.2f}" if "times_one_card" in row else "",
                f"{row['peak_gib']:.1f}",
                f"{apart['grad_norm']:.1e}" if apart else "",
            ]
        )
    return table(
        ["a step of", "on", "tokens a second", "times one card", "GiB a card", "gradient norm off by"], rows
    )


def ranks_agree() -> str:
    """Agreement of ranks with one card, and of one card with itself."""
    measured = [row for row in _rows() if "distance" in row]
    rows = []
    for row in measured:
        if row["layout"] == LOADED:
            what, bar = f"{row['case']}: saved on two, the next step on one", judged(row["is_equal"])
        elif _is_exact(row):
            what = f"{row['case']}: {LAYOUTS[row['layout']]}"
            bar = judged(max(row["distance"].values()) <= EXACT)
        elif row["layout"] == HALVED:
            what, bar = f"{row['case']}, bfloat16: one card, half as large micro-batches", ""
        else:
            continue
        rows.append([what, f"{row['distance']['rl_loss']:.1e}", f"{row['distance']['grad_norm']:.1e}", bar])
    return table(
        ["against one card, largest over the steps", "loss", "gradient norm", "1e-5; the same bits loaded"],
        rows,
    )


def ranks_facts() -> str:
    """Speed of all weights beside an adapter on one card."""
    speed = {
        row["case"]: row["tokens_per_s"][1] for row in _rows() if row["layout"] == ONE and "error" not in row
    }
    ratio = speed["all weights"] / speed["LoRA 16"]
    return f"On one card all weights train {ratio:.2f} times as fast as LoRA 16 (target 0.3: {judged(ratio >= 0.3)})."


def asynchronous() -> str:
    """Asynchronous beside synchronous RL."""
    found = load("async_training")["rows"]
    alone = min(row["mean_step_s"] for row in found if not row["staleness"] and "error" not in row)
    rows = []
    for row in found:
        head = ["trainer's own engine" if row["engine"] == "local" else "vLLM", str(row["staleness"])]
        if "error" in row:
            rows.append([*head, "did not run", *[""] * 6])
            continue
        busy = ", ".join(f"{share:.0f} %" for share in row["busy_percent"].values())
        rows.append(
            [
                *head,
                spread(row["step_s"], 1),
                f"{alone / row['mean_step_s']:.2f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{100 * row['trainer_waits']:.0f} %",
                busy,
                f"{row['logp_gap_mean'][1]:.4f}",
                f"{row['staleness_max']}",
            ]
        )
    header = [
        "engine",
        "staleness",
        "seconds a step",
        "times the faster synchronous",
        "sampled tokens a second",
    ]
    header += ["trainer waits", "card busy", "log-prob gap, nats", "oldest token, steps"]
    return table(header, rows)


def served() -> str:
    """vLLM through the client that training uses, beside vLLM alone."""
    rates = {
        (row["load"], row["side"]): row["whole_tokens_per_s"] for row in load("generation_served")["rows"]
    }
    rows = []
    for name in dict.fromkeys(each for each, _ in rates):
        ours, other = rates.get((name, "served")), rates.get((name, "vllm"))
        if ours and other:
            ratio = ours[1] / other[1]
            bar = judged(ratio >= 0.95) if name == "agent" else ""
            what = "an agent's load" if name == "agent" else f"{name} rows"
            rows.append([what, spread(ours, 0), spread(other, 0), f"{ratio:.2f}", bar])
    header = [
        "tokens a second, 1.5B, LoRA 16",
        "vLLM through our client",
        "vLLM alone",
        "ratio",
        "target 0.95",
    ]
    return table(header, rows)
