"""Blocks on sampler, trainer and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from published.write import judged, load, middle, spread, table


def agreement() -> str:
    way = load("generation_h200")["ways"][0]
    runs = [r for r in load("targeted_feedback")["runs"] if r["machine"].endswith("ba7def0")]
    gaps = [step["logp_gap_max"] for run in runs for step in run["steps"]]
    equal, seen = sum(gap == 0 for gap in gaps), load("engines")["agreement"]
    packed = load("packed_forward")["log_prob_gap"]
    rows = [
        ["sampler against trainer, 128 rows", f"{way['gap_max']:.3f}"],
        [f"the same in {seen['cells']} runs of other shapes and models", f"{seen['unequal']} tokens differ"],
        [
            f"the same in training before short products were padded: {equal} of {len(gaps)} steps equal",
            f"{max(gaps):.3f}",
        ],
        ["vLLM's samples read by the same trainer", f"{seen['vllm_max_nats']:.3f}"],
        ["**packed hinted turns against separate ones, in bfloat16**", f"**{packed:.3f}**"],
    ]
    return table(["largest difference of a token's log-prob", "nats"], rows)


def _shape(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['rows']} rows, prompt {row['prompt']:,}"


def decode() -> str:
    """Tokens a second while decoding, every shape that was measured beside vLLM."""
    rows = []
    for row in load("engines")["decode"]:
        ours, other, trained = row["woodshed"], row["vllm"], row.get("woodshed_lora_16")
        ratio = f"{middle(ours) / middle(other):.2f}"
        if trained:
            ratio += f"; {middle(trained) / middle(other):.2f} with LoRA"
        rows.append(
            [_shape(row), spread(ours, 0), spread(trained, 0) if trained else "", spread(other, 0), ratio]
        )
    for load_ in load("engines")["agent_load"]:
        sides = load_["seconds"]
        ratio = f"{middle(sides['vllm']) / middle(sides['woodshed']):.2f}"
        lora = sides.get("woodshed_lora_16")
        if lora:
            ratio += f"; {middle(sides['vllm']) / middle(lora):.2f} with LoRA"
        seconds = [
            f"{spread(sides[name])} s" if name in sides else ""
            for name in ("woodshed", "woodshed_lora_16", "vllm")
        ]
        rows.append([f"{load_['model']}, {load_['what']}", *seconds, ratio])
    header = ["shape", "Woodshed, tokens a second", "with LoRA 16, as it trains", "vLLM", "Woodshed / vLLM"]
    return table(header, rows)


SIDES = {
    "woodshed": "Woodshed",
    "trl": "TRL, generation by transformers (its slowest way)",
    "trl_vllm": "TRL + vLLM on the same card, no importance correction",
    "trl_vllm_importance": "TRL + vLLM, its default importance correction",
}


def _grpo(rows: Sequence[Mapping[str, Any]], micro_rows: str, when: str) -> list[list[str]]:
    """Rows of one measurement, each beside Woodshed with as many micro-rows."""
    said = []
    for row in rows:
        size = str(row.get("micro_rows", micro_rows))
        ours = next(
            r for r in rows if r["side"] == "woodshed" and str(r.get("micro_rows", micro_rows)) == size
        )
        times = middle(row["step_s"]) / middle(ours["step_s"])
        ratio = "" if row is ours else f"{times:.2f}"
        name = SIDES.get(row["side"], row["side"])
        said.append([f"{name}, {size} rows, {when}", spread(row["step_s"]), ratio, f"{row['peak_gib']:.1f}"])
    return said


def grpo() -> str:
    """GRPO side by side: the sides of the kept measurement, and the transcribed ones until it has TRL with vLLM."""
    kept = load("grpo_side_by_side")
    size = kept["settings"]["micro_rows"]
    rows = _grpo(kept["rows"], size, "kept file")
    if not any(row["side"].startswith("trl_vllm") for row in kept["rows"]):
        rows += _grpo(load("engines")["grpo"], size, "transcribed")
    return table(["side", "seconds a step", "times Woodshed's", "peak GiB"], rows)


DEFAULT_TEACHER = "ema, separate"
"""How the settings' defaults read in a row of `hint_cost`; tests/test_docs.py holds it against the settings."""


def hint_cost() -> str:
    """What hints add to an update: the kept measurement, or the transcribed one until that has the default teacher."""
    kept = load("targeted_step")["rows"]
    if any(row["what"].startswith("ema") for row in kept):
        found = [(row["what"], row["added"]) for row in kept if row["what"] != "RL alone"]
    else:
        said = load("engines")["hint_cost"]
        found = [
            (
                f"{row['teacher']}, {row['forward']}, measured {row['measured']}",
                row["added"] if "added" in row else row["seconds"] / said["alone_s"] - 1,
            )
            for row in said["rows"]
        ]
    rows = [
        [
            f"{name}: **the default**" if name.startswith(DEFAULT_TEACHER) else name,
            f"{100 * added:+.1f} %",
            judged(added <= 0.05),
        ]
        for name, added in found
    ]
    return table(
        ["teacher, forward, how often gradient norms are measured", "added to RL alone", "bar 5 %"], rows
    )


def muon() -> str:
    names = ("ours", "dion", "dion, its Triton", "torchtitan", "torch")
    again = load("engines")["muon"]
    rows = [[f"{again['case']}, measured again", *(f"{again['ms'][name]:.1f}" for name in names), "", ""]]
    for file, where in (("muon_step", "one card"), ("muon_step_2_cards", "two cards")):
        row = load(file)["rows"][0]
        moved = row["ceilings"]["transfers_ms"]
        note = f"{moved:.1f}" if moved or where == "one card" else f"{moved:.1f}: **nothing was exchanged**"
        times = [f"{row['ms'][name]:.1f}" for name in names]
        rows.append([f"{row['case']}, {where}", *times, f"{row['efficiency']:.2f}", note])
    header = ["a step at equal math, ms", "ours", "dion", "dion, its Triton", "torchtitan", "torch.optim"]
    return table([*header, "floor / ours", "transfers, ms"], rows)


def muon_facts() -> str:
    dense, experts = load("muon_convergence")["dense"]["rows"], load("muon_convergence_moe")["moe"]["rows"]
    steps = ", ".join(f"{row['share']:.3f}" for row in dense)
    mixed = ", ".join(f"{row['muon_share']:.3f}" for row in experts)
    first, again = load("muon_step")["rows"][0]["ms"], load("engines")["muon"]["ms"]
    slow = [ms["torch"] / ms["ours"] for ms in (first, again)]
    return "\n".join(
        [
            f"- Steps to AdamW's best loss, as a share of AdamW's, three seeds (bar 0.75): dense {steps}; mixture of "
            f"experts {mixed}.",
            f"- torch.optim.Muon is no stable rival: {slow[0]:.2f} and {slow[1]:.2f} times ours in two measurements of "
            "one case. It waits for the host.",
        ]
    )
