"""Blocks on training steps, one card and several, and on engine and trainer beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from published.write import judged, load, spread, table

ONE, HALVED, LOADED = "one card", "one card, half micro-batches", "one card, loaded from the ranks"
LAYOUTS = {
    "fsdp": "two cards, weights cut",
    "replicate": "two cards, base whole on both",
    "ep": "two cards, experts dealt out",
    "cp": "two cards, each sequence cut",
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


def async_attempts() -> str:
    """Making of attempts by engine and staleness, in runs that trained nothing."""
    rows = []
    for row in load("async_attempts_h200")["rows"]:
        assert not row["updates"], "these runs trained"
        name = "the trainer's own" if row["engine"] == "local" else "vLLM"
        busy = ", ".join(f"{share:.0f} %" for share in row["busy_percent"].values())
        size = f"{row['update_bytes'][1] / 1e6:.1f} MB" if row["update_bytes"][1] else ""
        rate = "not steady" if row["staleness"] else f"{row['attempts_per_s']:.1f}"
        cells = [name, str(row["staleness"]), rate, spread(row["step_s"], 1), busy, size]
        rows.append([*cells, str(row["staleness_max"])])
    header = ["engine", "staleness", "attempts a second", "seconds for 64", "card busy"]
    return table([*header, "a version's weights", "oldest token, steps"], rows)
