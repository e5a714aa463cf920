"""Blocks on sampler, trainer and optimizer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from published.write import judged, load, middle, spread, table


def _loads() -> list[dict[str, Any]]:
    """Rows of `benchmarks/generation.py` over several loads; none where only older measurements are kept."""
    for name in ("generation_h200", "generation"):
        rows = load(name).get("rows")
        if isinstance(rows, list):
            return rows
    return []


def vllm_training() -> str:
    """Two steps through a real server: how far it is from the trainer, or why it was refused."""
    rows = []
    for row in load("vllm_training")["rows"]:
        head = "is the embedding" if row["output_layer"] == "tied" else "of its own"
        gaps = row.get("logp_gap_mean")
        seen = (
            "refused: " + row["refused"][:80] if gaps is None else " and ".join(f"{gap:.1e}" for gap in gaps)
        )
        rows.append([row["weights"], head, "yes" if row["enable_lora"] else "no", seen])
    return table(
        ["weights", "output layer", "`--enable-lora`", "mean log-prob gap of two steps, nats a token"], rows
    )


def weight_updates() -> str:
    """Bytes and seconds of an update, on real gradients."""
    rows = [
        [
            row["weights"],
            str(row["layers"]),
            str(row["steps"]),
            f"{100 * row['share_mean']:.2f} %",
            f"{100 * row['share_max']:.2f} %",
            f"{row['write_s_median']:.1f} / {row['receive_s_median']:.1f}",
            f"{row['exact']} of {row['versions']}",
        ]
        for row in load("weight_updates")["rows"]
    ]
    return table(
        [
            "trained",
            "layers",
            "steps",
            "mean share",
            "largest",
            "seconds to write / receive",
            "equal bit for bit",
        ],
        rows,
    )


def agreement() -> str:
    runs = [r for r in load("targeted_feedback")["runs"] if r["machine"].endswith("ba7def0")]
    gaps = [step["logp_gap_max"] for run in runs for step in run["steps"]]
    equal, seen = sum(gap == 0 for gap in gaps), load("engines")["agreement"]
    ours = [row for row in _loads() if "gap_max" in row]
    if ours:
        tokens, differ = sum(row["compared"] for row in ours), sum(row["unequal"] for row in ours)
        rows = [
            [
                f"sampler against trainer, {len(ours)} load(s): {differ} of {tokens:,} tokens differ",
                max(r["gap_max"] for r in ours),
            ]
        ]
    else:
        rows = [["sampler against trainer, 128 rows", load("generation_h200")["ways"][0]["gap_max"]]]
    rows += [
        [f"in training, before short products were padded: {equal} of {len(gaps)} steps equal", max(gaps)],
        ["vLLM's samples read by the same trainer", seen["vllm_max_nats"]],
        ["**packed hinted turns against separate ones**", load("packed_forward")["log_prob_gap"]],
    ]
    shown = [[name, f"{gap:.3f}"] for name, gap in rows]
    shown.insert(
        1,
        [f"the same in {seen['cells']} runs of other shapes and models", f"{seen['unequal']} tokens differ"],
    )
    return table(["bfloat16, largest difference of a token's log-prob", "nats"], shown)


@dataclass(frozen=True)
class Decoded:
    """Tokens a second of one load, as [lowest, median, highest]."""

    what: str
    is_small: bool
    """The 0.5B model, not the shape of a 7B one."""
    num_rows: int
    """Rows of short prompts, 0 for other loads."""
    ours: Sequence[float]
    trained: Sequence[float] | None
    """With an adapter."""
    other: Sequence[float]
    """vLLM's."""


LOADS = {
    "16": ("16 rows, prompt 512", 16),
    "128": ("128 rows, prompt 512", 128),
    "512": ("512 rows, prompt 512", 512),
    "16 long": ("16 rows, prompt 8,192", 0),
    "agent": ("an agent's load: 128 conversations of 5 turns", 0),
}


def decoded() -> list[Decoded]:
    """Every load that was measured beside vLLM: the kept measurement, or the transcribed one until there is one."""
    kept = [row for row in _loads() if row["load"] in LOADS]
    if any(row["side"] == "vllm" for row in kept):
        return list(_from_rows(kept))
    found = []
    for row in load("engines")["decode"]:
        short = row["rows"] if row["prompt"] == 512 else 0
        what = f"{row['model']}, {row['rows']} rows, prompt {row['prompt']:,}"
        ours, lora, other = row["woodshed"], row.get("woodshed_lora_16"), row["vllm"]
        found.append(Decoded(what, row["model"] == "0.5B", short, ours, lora, other))
    for row in load("engines")["agent_load"]:
        rates = {
            name: [row["tokens"] / s for s in reversed(seconds)] for name, seconds in row["seconds"].items()
        }
        what = f"{row['model']}, {row['what']}"
        found.append(Decoded(what, True, 0, rates["woodshed"], rates.get("woodshed_lora_16"), rates["vllm"]))
    return found


def _from_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[Decoded]:
    rates = {
        (row["model"], row["load"], row["side"], row["lora_rank"]): row.get(
            "decode_tokens_per_s", row["whole_tokens_per_s"]
        )
        for row in rows
    }
    for model, name in dict.fromkeys((row["model"], row["load"]) for row in rows):
        ours, other = (rates.get((model, name, side, 0)) for side in ("woodshed", "vllm"))
        if ours and other:
            what, short = LOADS[name]
            size = "7B" if "7b" in model.lower() else "0.5B"
            trained = rates.get((model, name, "woodshed", 16))
            yield Decoded(f"{size}, {what}", size == "0.5B", short, ours, trained, other)


def decode() -> str:
    """Tokens a second while decoding, or over the whole call for an agent's load."""
    return _beside_vllm(decoded())


def decode_again() -> str:
    """The same, measured on another day by `benchmarks/generation.py`, with fewer loads."""
    kept = [row for row in load("generation_beside_vllm")["rows"] if row["load"] in LOADS]
    return _beside_vllm(list(_from_rows(kept)))


def decode_lora() -> str:
    """Decoding with an adapter on both sides, measured on another day."""
    rows = {(row["side"], row["load"]): row for row in load("generation_lora_h200")["rows"]}
    shown = []
    for name in ("16", "128"):
        ours, other = rows[("woodshed", name)], rows.get(("vllm", name))
        rate = ours["decode_tokens_per_s"]
        cells = [f"{name} rows, prompt 512", spread(rate, 0), f"{ours['unequal']} of {ours['compared']:,}"]
        if other is None:
            shown.append([*cells, "not reached", ""])
            continue
        ratio = middle(rate) / middle(other["decode_tokens_per_s"])
        shown.append(
            [*cells, spread(other["decode_tokens_per_s"], 0), f"{ratio:.2f}: {judged(ratio >= 0.9)}"]
        )
    header = ["tokens a second, 0.5B, LoRA 16", "Woodshed", "log-probs that differ from the trainer's"]
    return table([*header, "vLLM with the adapter", "ratio, target 0.9"], shown)


def _beside_vllm(loads: Sequence[Decoded]) -> str:
    rows = []
    for found in loads:
        ratio = f"{middle(found.ours) / middle(found.other):.2f}"
        if found.trained:
            ratio += f"; {middle(found.trained) / middle(found.other):.2f} with LoRA"
        trained = spread(found.trained, 0) if found.trained else ""
        rows.append([found.what, spread(found.ours, 0), trained, spread(found.other, 0), ratio])
    header = ["tokens a second", "Woodshed", "with LoRA 16, as it trains", "vLLM", "Woodshed / vLLM"]
    return table(header, rows)


SIDES = {
    "woodshed": "Woodshed",
    "trl": "TRL, generation by transformers (its slowest way)",
    "trl-generate": "TRL, generation by transformers (its slowest way)",
    "trl-vllm": "TRL + vLLM on the same card, no importance correction",
    "trl-vllm, importance": "TRL + vLLM, its default importance correction",
}


def _grpo(rows: Sequence[Mapping[str, Any]], micro_rows: str) -> list[list[str]]:
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
        said.append([f"{name}, {size} rows", spread(row["step_s"]), ratio, f"{row['peak_gib']:.1f}"])
    return said


def grpo() -> str:
    """GRPO side by side: the sides of the kept measurement."""
    kept = load("grpo_side_by_side")
    rows = _grpo(kept["rows"], kept["settings"].get("micro_rows", ""))
    return table(["side", "seconds a step", "times Woodshed's", "peak GiB"], rows)


def step() -> str:
    """A step of training on a card."""
    found, update = load("engines")["step_of_128"], load("engines")["update"]
    seconds, bar = found["seconds"], found["bar"]
    lora, full = update["lora_s"], update["full_s"]
    rows = [
        [
            "attempts and verdicts of 128 attempts, 16 cores",
            f"{min(seconds):.1f} to {max(seconds):.1f} s",
            f"{bar} s: {judged(max(seconds) <= bar)}",
        ],
        ["update over 98,688 ids, LoRA in bfloat16", f"{spread(lora)} s", ""],
        [
            f"the same, full weights in float32, {update['full_gib']} GiB",
            f"{spread(full)} s, {middle(full) / middle(lora):.0f} times as long",
            "",
        ],
    ]
    return table(["one H200, 0.5B", "", "target"], rows)


def redesign() -> str:
    """Decoding and a step on a card, before and after the redesign."""
    first, later = load("redesign_decoding_h200"), load("redesign_step_h200")
    names = {"0": "no adapter", "16": "LoRA 16"}
    rows = []
    for name, ratio in first["ratios"].items():
        if name.startswith("decoding, "):
            rows_of_load, _, rank = name.removeprefix("decoding, ").partition(" rows, adapter ")
            what = "an agent's load" if rows_of_load == "agent" else f"{rows_of_load} rows"
            rows.append([f"decoding, {what}, {names[rank]}", f"{ratio:.2f}"])
    rows += [
        ["a GRPO step, LoRA 16, one attention call for each sample", f"{first['ratios']['step']:.2f}"],
        ["the same, one call for samples of similar length", f"{later['ratios']['step']:.2f}"],
        ["its peak memory", f"{later['ratios']['peak memory']:.2f}"],
    ]
    return table(["one H200, 0.5B, bfloat16", "times the earlier tree's speed (memory: its size)"], rows)


def full_weights() -> str:
    """A step that trains all weights beside one that trains an adapter."""
    steps = [row for row in load("redesign_step_h200")["rows"] if row["tree"] == "this"]
    lora_s = statistics.median(row["step"]["step_s"] for row in steps)
    lora_gib = max(row["step"]["peak_gib"] for row in steps)
    rows = [["LoRA 16, 16 rows at a time", f"{lora_s:.2f}", f"{lora_gib:.1f}", ""]]
    for row in load("full_weights_h200")["rows"]:
        what = f"all weights, {row['micro_rows']} rows at a time"
        rows.append(
            [what, spread(row["step_s"]), f"{row['peak_gib']:.1f}", f"{lora_s / row['step_s'][1]:.2f}"]
        )
    return table(["one H200, 0.5B, bfloat16", "seconds a step", "peak GiB", "times LoRA's speed"], rows)


DEFAULTS = "the settings' defaults"  # the row of benchmarks/targeted_step.py


def hint_cost() -> str:
    """The cost of hints in an update."""
    rows = [
        [
            f"{row['what']}: **the default**" if row["what"] == DEFAULTS else row["what"],
            f"{100 * row['added']:+.1f} %",
            judged(row["added"] <= 0.05),
        ]
        for row in load("targeted_step")["rows"]
        if not row["what"].startswith("RL alone")
    ]
    return table(
        ["teacher, forward, how often gradient norms are measured", "added to RL alone", "target 5 %"], rows
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
            f"- Steps to AdamW's best loss, as a share of AdamW's, three seeds (target 0.75): dense {steps}; mixture "
            f"of experts {mixed}.",
            f"- torch.optim.Muon is no stable rival: {slow[0]:.2f} and {slow[1]:.2f} times ours in two measurements of "
            "one case. It waits for the host.",
        ]
    )
