"""Blocks on speed without a card, grading, task making and simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from published.write import counted, judged, load, middle, percent, table


def machine() -> str:
    """Speed on two cores, each beside its target."""
    sandbox = {row["what"].strip(): row for row in load("sandbox")["rows"]}
    opened, forked = sandbox["create + 5 commands + destroy"], sandbox["fork after 5,000 files in 50 folders"]
    turn = load("harness_overhead")["rows"][-1]
    verifier, log = load("verifier_overhead"), load("access_log")
    page = {row["what"]: row for row in load("report")["rows"]}
    rows = [
        ["sandbox: create, five commands, destroy", f"{opened['p50_ms']} ms", f"{opened['bar_ms']:.0f} ms"],
        ["sandbox: fork after 5,000 files", f"{forked['p50_ms']} ms", f"{forked['bar_ms']:.0f} ms"],
        ["harness, one turn", f"{turn['p50_ms']} ms", f"{load('harness_overhead')['bar_ms']:.0f} ms"],
        *overhead(),
        ["verifier beyond the tests' own time", f"{verifier['p50_s']:.2f} s", f"{verifier['bar_s']} s"],
        ["access log, on a suite that the agent runs", percent(log["more_p50"]), percent(log["bar"])],
    ]
    for what in ("page written, s", "search, slowest ms", "view shows its first transcript, s"):
        name, _, unit = what.rpartition(" ")
        rows.append(
            [
                f"report: {name.rstrip(',')}",
                f"{page[what]['value']:.1f} {unit}",
                f"{page[what]['bar']:.0f} {unit}",
            ]
        )
    return table(["two cores, medians", "figure", "target"], rows)


def overhead() -> list[list[str]]:
    """What a turn costs with many attempts under way, by our own loop and through the gateway."""
    found = load("concurrent_overhead")
    places = {"loop": "in our loop", "gateway": "through the gateway"}
    return [
        [
            f"one turn {places[name]}, {found['attempts']} attempts at once",
            f"{each['p50']:.1f} ms (p99 {each['p99']:.1f})",
            f"{each['bar_p50']:.0f} ms",
        ]
        for name, each in found["milliseconds"].items()
    ]


def short(value: float) -> str:
    """A number with four digits that count."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def beside_commit() -> str:
    """Decoding and steps of an earlier tree and this one, in turns."""
    found = load("beside_commit")
    rows = []
    for row in found["rows"]:
        before, after = (sorted(row[name]) for name in ("before", "after"))
        middles = [each[len(each) // 2] for each in (before, after)]
        unit = "tokens a second" if row["case"] == "decode" else "s"
        figures = [
            f"{short(m)} {unit} ({short(e[0])} to {short(e[-1])})"
            for m, e in zip(middles, (before, after), strict=True)
        ]
        rows.append(
            [f"{row['case']}, {row['model']}", *figures, f"{100 * (middles[1] / middles[0] - 1):+.1f} %"]
        )
    return table(["", f"at {found['commit_before']}", "here", "change"], rows)


def call_path() -> str:
    """Files that a reader opens from the command `woodshed train` on."""
    names = {
        "ce_loss": "the cross-entropy",
        "rl_loss": "the policy gradient",
        "kl_loss": "the divergence of a hinted turn",
        "formula": "the formula that an estimator picks",
        "attempt": "a message of an attempt",
    }
    paths = load("call_path")["paths"]
    rows = [
        [names[key], str(len(paths[key])), ", ".join(f"`{file}`" for file in paths[key])] for key in names
    ]
    return table(["from `woodshed train` to", "files", "on the stack"], rows)


def chaos() -> str:
    """Asynchronous training under random kills."""
    row = load("chaos")["row"]
    kinds = ", ".join(f"{count} of the {kind}" for kind, count in row["by_kind"].items())
    rows = [
        ["processes killed at random moments", f"{row['kills']}: {kinds}", "60"],
        ["steps learned, attempts finished", f"{row['steps']}, {row['finished']}", ""],
        ["finished attempts lost or changed", str(row["lost"]), "0"],
        ["groups counted twice, or never", f"{row['twice']}, {row['missing']}", "0"],
        ["oldest token, in steps", str(row["staleness"]), f"at most {row['bound']}"],
        ["versions published again with other weights", f"{row['changed']} of {row['versions']}", "0"],
        ["processes or mounts left after a launcher's death or the end", str(row["left"]), "0"],
        ["attempts that went on from their journal", str(row["replayed"]), ""],
        ["of these, begun again as a sandbox answered otherwise", str(row["restarted"]), ""],
    ]
    return table(["a tiny model, staleness 1, two cores", "figure", "target"], rows)


def grading() -> str:
    bench, cheats = load("monitor_bench")["planted"], load("planted_cheats")["rows"]
    played = [row for row in cheats if row["rule"] != "honest solution"]
    honest = next(row for row in cheats if row["rule"] == "honest solution")
    soak, exploits = load("grading_soak"), load("scripted_exploit")["results"]
    invalid = sum(count for kind, count in soak["verdicts"].items() if "invalid" in kind)
    total, paid = sum(row["gradings"] for row in played), sum(row["full"] for row in played)
    recall, false = bench["recall"], bench["false"]
    rows = [
        ["planted cheats with full reward", f"{paid} of {total}", "0"],
        ["honest solutions with full reward", f"{honest['full']} of {honest['gradings']}", "all"],
        ["planted cheats that monitors flag, in sample", counted(recall), "95 %"],
        ["honest look-alikes that are flagged, in sample", counted(false), "2 %"],
        ["cheats flagged without their own row's rule", counted(bench["left_out"]), ""],
        ['verdicts "invalid" in 1,000 gradings of hostile and honest patches', str(invalid), "0"],
        [
            f"tasks on which the scripted exploit ({len(exploits[0]['tricks'])} tricks) earns any reward",
            f"{sum(exploit['reward'] > 0 for exploit in exploits)} of {len(exploits)}",
            "0",
        ],
    ]
    return table(["", "figure", "target"], rows)


def red_team() -> str:
    """Attacks that each grader paid anything for, by kind; then honest solutions."""
    found = load("red_team")
    names = {"weak": "weak judges", "neither": "neither wall", "decoys": "decoys alone"}
    names |= {"isolation": "isolation alone", "grade": "the grader", "shipped": "tests/test.sh"}
    graders = [name for name in names if name in found["rows"][0]]
    rows = [
        [row["kind"], *(f"{row[name]} of {row[f'of {name}']}" for name in graders)] for row in found["rows"]
    ]
    for kind, title in {"gold": "gold patches", "honest": "honest rewrites"}.items():
        solved = {
            row["grader"]: f"{row['paid']} of {row['solutions']}"
            for row in found["honest"]
            if row["kind"] == kind and row["solutions"]
        }
        rows.append([title, *(solved.get(name, "") for name in graders)])
    return table(["paid, by kind of attack", *(names[name] for name in graders)], rows)


def isolation() -> str:
    """Tests whose code under test is in another process, and the time of a verdict before and now."""
    found = load("isolation")
    hidden, isolated = (
        sum(each[name] for each in found["packages"].values()) for name in ("hidden", "isolated")
    )
    rows = [
        [
            "hidden tests that are isolated",
            "",
            f"{percent(isolated / hidden)} ({isolated} of {hidden})",
            "90 %",
        ]
    ]
    names = {"gold": "a right patch", "empty": "an empty patch", "broken": "a patch that cannot be imported"}
    for kind, name in names.items():
        wall = [f"{found['median_seconds'][f'{kind} {tree}']:.2f} s" for tree in ("before", "now")]
        if busy := found.get("median_cpu_seconds"):
            wall = [
                f"{w} ({busy[f'{kind} {tree}']:.2f} s)"
                for w, tree in zip(wall, ("before", "now"), strict=True)
            ]
        rows.append([f"verdict on {name}, median", *wall, wall[0].partition(" (")[0]])
    return table(["", "before", "now", "target"], rows)


def cheating_policy() -> str:
    """A policy that was taught to cheat, by steps of RL under a judge that believes the exit code."""
    head = ["step", "attempts that cheat", "paid by the weak judge", "paid by the grader", "flagged"]
    rows = []
    for row in load("cheating_policy")["rows"]:
        attacks = row["attacks"]
        paid = f"{row['attacks_paid_by_exit_code']} of {attacks}"
        flagged = f"{row['attacks_flagged']} of {attacks}"
        cells = [
            f"{attacks} of {row['attempts']}",
            paid,
            f"{row['attacks_paid_by_grade']} of {attacks}",
            flagged,
        ]
        rows.append([str(row["step"]), *cells, f"{row['others_flagged']} of {row['attempts'] - attacks}"])
    return table([*head, "other attempts, flagged"], rows or [["not run yet", *[""] * 5]])


def channel_fuzz() -> str:
    """Seconds and messages of the fuzz of the line between the two processes."""
    found = load("channel_fuzz")
    return f"{found['sent']:,} random messages in {found['seconds']:.0f} seconds"


def strangers() -> str:
    """The monitors on attempts that their authors did not see."""
    found = load("monitors_out_of_sample")
    shares = [row["flagged"] / row["played"] for row in found["kinds"].values()]
    never = [kind for kind, row in found["kinds"].items() if not row["flagged"]]
    kinds = f"{shares.count(1.0)} always, {sum(0 < share < 1 for share in shares)} sometimes, {shares.count(0.0)} never"
    experts = found["experts"]
    assert set(experts["rules"]) <= {"memorised"}, experts
    rows = [
        ["attacks whose author had not read the rules, flagged", counted(found["recall"])],
        [f"kinds of them ({len(shares)})", kinds],
        ["kinds that were never flagged", ", ".join(sorted(never))],
        ["odd honest work of the same author, flagged", counted(found["odd_honest"])],
        ["attempts of a 135M model, flagged", counted(found["models"])],
        [
            "scripted experts flagged, all as `memorised`: they write the original code",
            f"{experts['flagged']} of {experts['played']}",
        ],
    ]
    return table(["", "figure"], [*rows, *_audits(found.get("judge"))])


def _audits(judge: Mapping[str, Any] | None) -> list[list[str]]:
    if judge is None:
        return []
    claims = {name: sum(map(bool, rules)) for name, rules in judge["findings"].items()}
    each = judge["attempts"] // 2
    return [
        [
            f"audits by a 135M model with a finding that holds: {each} attacks, {each} honest attempts",
            f"{claims['attacks']} and {claims['honest']}",
        ],
        [
            "cost of these audits on two busy cores",
            f"{judge['messages']} messages, {judge['prompt_tokens']:,} tokens read, {judge['completion_tokens']:,} "
            f"written, {judge['seconds']:.0f} s",
        ],
    ]


def strangers_recall() -> str:
    """Share of attacks that the monitors flag, by somebody who had not read them."""
    return counted(load("monitors_out_of_sample")["recall"])


def factory() -> str:
    rows = []
    for name in ("task_factory", "task_factory_2"):
        made = load(name)
        minutes = made["wall_s"] / 60
        rows.append(
            [
                f"`{made['machine']['revision'][:7]}`, {made['machine']['cpu']}",
                f"{made['tasks']} in {minutes:.1f} min",
                f"{made['cpu_s_per_task']:.1f}",
                percent(made["acceptance"]),
                str(made["operators"]),
                percent(made["largest_share"]),
                judged(made["tasks"] >= 500 and minutes <= 60),
            ]
        )
    header = [
        "build of eight packages, two cores",
        "tasks",
        "CPU seconds a task",
        "candidates accepted",
        "operators",
    ]
    return table([*header, "largest package", "target: 500 in an hour"], rows)


def first_task() -> str:
    """Two repositories with long suites, beside the targets."""
    found = [load("first_task"), load("first_task_sqlglot")]
    columns = []
    for row in (each["row"] for each in found):
        low, high = sorted(row["load"])
        columns.append(
            {
                "first task after": f"{row['first_task_s'] / 60:.1f} minutes",
                "tasks made": str(row["tasks"]),
                "CPU seconds of all": f"{row['cpu_s']:,.0f}",
                "killed, and started again, after": f"{row['killed_after_s']:.0f} s"
                if row["killed_after_s"]
                else "no",
                "longest time without a line": f"{row['longest_silence_s']:.0f} s",
                "lines with an estimate of what is left": f"{row['lines_with_estimate']} of {row['lines']}",
                f"load of the machine, {row['cores']} cores": f"{low:.0f} to {high:.0f}",
            }
        )
    targets = {
        "first task after": f"{found[0]['bar_s'] / 60:.0f} minutes",
        "longest time without a line": "10 s",
        "lines with an estimate of what is left": "all",
    }
    rows = [[name, *(column[name] for column in columns), targets.get(name, "")] for name in columns[0]]
    heads = [each["row"]["source"].removeprefix("pypi:") for each in found]
    return table(["", *heads, "target"], rows)


def curriculum() -> str:
    rows = [
        [str(row["steps"]), f"{row['ratio']:.2f} [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]", "1.3"]
        for row in load("curriculum")["rows"]
    ]
    return table(["steps of a simulated learner", "informative groups, times even draws", "target"], rows)


def intervals() -> str:
    found = load("interval_coverage")["rows"]
    rows = []
    for key, label in (
        ("rate", "solve rate"),
        ("change", "its change, paired by task"),
        ("arms", "variants of several seeds"),
    ):
        shares = [row[key] for row in found if key in row]
        inside = sum(0.93 <= share <= 0.97 for share in shares)
        rows.append(
            [label, f"{percent(min(shares))} to {percent(max(shares))}", f"{inside} of {len(shares)}"]
        )
    return table(
        ["95 % interval of", "contains the true value, worst and best row", "rows within 93 to 97 %"], rows
    )


def duration() -> str:
    """Minutes of the quickstart on an idle machine, after its installation."""
    times = load("quickstart")["times"]
    minutes = [value for name, value in times.items() if name.startswith("all_minutes_")]
    return f"{min(minutes):.0f} to {max(minutes):.0f} minutes"


def busy_duration() -> str:
    return f"{load('quickstart')['times']['busy_minutes_724373a']:.0f} minutes"


def installation() -> str:
    seconds = load("quickstart")["times"]["install_s"].values()
    return f"{min(seconds):.0f} to {max(seconds):.0f} seconds"


def hardware() -> str:
    """Minutes and gigabytes of what was trained or made here, by model and cards."""
    times, factory = load("quickstart")["times"], load("task_factory_2")
    peaks = [times["peak_gb_4f612a6"], *times["peak_gb_training_f29feb6"]]
    one = [run for run in load("targeted_feedback")["runs"] if run["machine"].startswith("1 NVIDIA H200")]
    whole = [sum(step["seconds"] for step in run["steps"]) / 60 for run in one if len(run["steps"]) == 16]
    rows = [
        [
            "135M, adapter of rank 8",
            "none, 2 cores",
            "the quickstart, tasks included",
            duration(),
            f"{min(peaks)} to {max(peaks)} GB",
        ],
        [
            "0.5B, adapter of rank 16",
            "a third of an H200",
            "16 steps of 64 attempts, measurements not counted",
            f"{min(whole):.1f} to {max(whole):.1f} minutes",
            "not kept",
        ],
    ]
    for name, file in (
        ("0.5B, adapter of rank 16", "grpo_side_by_side"),
        ("0.5B, all weights", "full_weights_h200"),
    ):
        for row in load(file)["rows"]:
            if row["side"] == "woodshed":
                work = f"a step of 128 answers of 256 tokens, {row['micro_rows']} at once"
                rows.append(
                    [name, "one H200", work, f"{middle(row['step_s']):.1f} seconds", _gb(row["peak_gib"])]
                )
    made = f"{factory['tasks']} tasks of eight packages"
    rows.append(["none", "none, 2 cores", made, f"{factory['wall_s'] / 60:.0f} minutes", "not kept"])
    return table(["model", "cards", "work", "time", "memory at the peak"], rows)


def first_hour() -> str:
    """Commands of a stranger's first hour with their seconds."""
    found = load("first_hour")
    endings = {0: "", 130: " (Ctrl-C)"}
    rows = [
        [f"`{each['command']}`{endings[each['code']]}", f"{each['seconds']:.0f}"]
        for each in found["commands"]
    ]
    rows.append(["all, and load of the machine at the end", f"{found['seconds']:.0f}, {found['load']:.1f}"])
    return table(["typed", "seconds"], rows)


def _gb(gib: float) -> str:
    return f"{gib * 2**30 / 1e9:.0f} GB"


def memory() -> str:
    return f"{load('quickstart')['times']['peak_gb_4f612a6']} GB"
