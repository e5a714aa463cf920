"""Tables on training over ranks, and on a mixture of experts."""

from __future__ import annotations

from typing import Any

from published.write import load, percent, table

WAYS = {
    "none": "the trainer's own routers",
    "replay": "the engine's experts replayed",
    "damaged": "... with one logged choice in fifty of another token",
    "refilled": "... whose implausible choices are refilled",
}


def router_replay() -> str:
    rows = load("router_replay")["rows"]
    families = dict.fromkeys(row["family"] for row in rows)
    found = {(row["family"], row["way"]): row for row in rows}
    shown = []
    for way, name in WAYS.items():
        gaps = [found[family, way] for family in families]
        shown.append([name, *(f"{gap['mean']:.4f}, {gap['p99']:.3f}" for gap in gaps)])
    differing = [percent(found[family, "none"]["differing"]) for family in families]
    shown.append(["choices that are not the engine's, without replay", *differing])
    return table(["gap of a sampled token in nats: mean, p99", *families], shown)


def ranks_equal() -> str:
    rows = load("ranks_equal")["equal"]
    shown = []
    for form in ("separate forwards", "joint", "shared rows"):
        of_form = [row for row in rows if _form(row["training"]) == form]
        worst = [max(row[key] for row in of_form) for key in ("four", "two", "later")]
        whole = sum(row["is_loaded_whole"] for row in of_form)
        shown.append(
            [form, str(len(of_form)), *(f"{each:.1e}" for each in worst), f"{whole} of {len(of_form)}"]
        )
    header = [
        "steps",
        "trainings",
        "4 ranks",
        "2 ranks",
        "2 ranks behind a checkpoint of 4",
        "loaded bit by bit",
    ]
    return table(header, shown)


def _form(training: str) -> str:
    axes, forward, *_ = training.split(", ")
    return axes if axes == "shared rows" else "joint" if forward == "joint" else "separate forwards"


def ranks_held() -> str:
    report: dict[str, Any] = load("ranks_equal")
    held, size = report["held"], report["held"]["model_bytes"]
    rows = []
    for kind, left_out in {"all": "", "own": ", without pages of files"}.items():
        for count in ("2", "4"):
            peaks = [
                max(rank[kind] for rank in held["peak_bytes"][form][count]) / size
                for form in ("whole", "shards")
            ]
            name = f"peak memory of a rank that loads, {count} ranks, in models{left_out}"
            rows.append([name, *(f"{peak:.2f}" for peak in peaks)])
    waits = sorted(each["waited_s"] for rank in held["waits"] for each in rank)
    complete = sorted(each["complete_s"] for rank in held["waits"] for each in rank)
    middle = len(waits) // 2
    rows.append(["a step waits for its checkpoint", f"{complete[middle]:.2f} s", f"{waits[middle]:.2f} s"])
    return table(["", "before", "now"], rows)


def ranks_dealt() -> str:
    by_way = {(row["ranks"], row["way"]): row["over_even"] for row in load("ranks_equal")["dealt"]}
    rows = [[str(count), *(f"{by_way[count, way]:.2f}" for way in ("tokens", "work"))] for count in (2, 8)]
    return table(["ranks", "dealt by tokens, over an even split", "by work"], rows)
