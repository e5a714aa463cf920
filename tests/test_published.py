"""Published figures come from the files in benchmarks/results: documents and files agree, and nothing stands beside."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
MEASURED = ("README.md", "docs/results.md", "docs/first-run.md", "docs/ideas.md")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    return tables


@pytest.fixture
def results(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the results that the generator reads."""
    from published import write

    copy = shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "results")
    monkeypatch.setattr(write, "RESULTS", copy)
    write.load.cache_clear()
    yield copy
    write.load.cache_clear()


def change(path: Path, edit) -> None:  # type: ignore[no-untyped-def]
    found = json.loads(path.read_text("utf-8"))
    edit(found)
    path.write_text(json.dumps(found), "utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_documents_are_what_the_files_say(tables: ModuleType, page: str):
    text = (ROOT / page).read_text("utf-8")
    assert tables.fill(text) == text, "run: python benchmarks/tables.py"


@pytest.mark.parametrize("page", MEASURED)
def test_no_figure_stands_beside_the_blocks(tables: ModuleType, page: str):
    assert tables.stray_figures((ROOT / page).read_text("utf-8")) == []


def test_evidence_of_decisions_is_in_the_log(tables: ModuleType):
    """A decision holds today, its figures are history: they stand in docs/log.md with the commit that wrote them."""
    text = (ROOT / "docs" / "decisions.md").read_text("utf-8")
    for found in re.findall(r"^\*Evidence\*: (.*?)^(?=\*|\n|#)", text, re.S | re.M):
        assert tables.stray_figures(found) == [], f"move to docs/log.md with its commit: {found}"
    log = (ROOT / "docs" / "log.md").read_text("utf-8").partition("## Evidence of decisions")[2]
    entries = re.findall(r"^### .*\n\n(.*)$", log, re.M)
    assert entries and all(re.match(r"\d{4}-\d\d-\d\d, `[0-9a-f]{7}`\. ", entry) for entry in entries)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_comments_of_recipes_repeat_no_result(tables: ModuleType, recipe: Path):
    """A recipe's comments name sizes that a reader must know to choose it, never what came out."""
    comments = re.findall(r"(?:^|\s)# (.*)$", recipe.read_text("utf-8"), re.M)
    assert [
        figure for figure in tables.stray_figures("\n".join(comments)) if "%" in figure or "times" in figure
    ] == []


@pytest.mark.parametrize(
    "text",
    "31.6 %|31.6%|4.5 times|1.29 to 1.33 times|31,263 tokens/s|31,263 tok/s|20,000 tokens a second|12 min|19 minutes|"
    "0.557 nats|5 s|13.5 s.|2.5-fold|-18.3 pp|11.6 points|67 MB|18.07 GiB|4 ms|an eighteenth, 1.8 %".split(
        "|"
    ),
)
def test_a_figure_is_found_however_it_is_spelled(tables: ModuleType, text: str):
    assert tables.stray_figures(f"It took {text}, as seen.")


def test_what_is_no_measured_figure(tables: ModuleType):
    plain = "Python 3.11 to 3.13, 135M weights, 0.5B, two H200, 2 cores, 95 % intervals, seeds 0, 1, 2, vLLM 0.26.0"
    fenced = "```\nwoodshed tasks make x=4 # 12 s\n```\n`5 s`\n"
    block = "<!-- figure: memory -->5.1 GB<!-- end -->"
    assert tables.stray_figures(f"{plain}\n{fenced}{block}") == []


def test_a_changed_file_changes_the_documents(tables: ModuleType, results: Path):
    """Every file that a page names takes part: without it the page cannot be made."""
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    change(results / "packed_forward.json", lambda found: found.update(log_prob_gap=0.25))
    assert "** | 0.250 |" in tables.fill(text) and "** | 0.557 |" in text
    named = set(re.findall(r"`(\w+\.json)`", text))
    assert len(named) > 15
    from published import write

    for name in named:
        write.load.cache_clear()
        (results / name).rename(results / "away")
        with pytest.raises(FileNotFoundError, match=name):
            tables.fill(text)
        (results / "away").rename(results / name)


def test_whichever_sides_the_comparison_holds(tables: ModuleType, results: Path):
    """A side that nobody foresaw is shown by its name."""
    from published import engines

    rows = [
        {"side": "woodshed", "micro_rows": 64, "step_s": [2.0, 2.0, 2.0], "peak_gib": 60.0},
        {"side": "trl-vllm", "micro_rows": 64, "step_s": [2.5, 2.6, 2.7], "peak_gib": 110.0},
        {"side": "sglang", "micro_rows": 64, "step_s": 3.0, "peak_gib": 110.0},
    ]
    change(results / "grpo_side_by_side.json", lambda found: found.update(rows=rows))
    from published import write

    write.load.cache_clear()
    shown = engines.grpo()
    assert "| 2.60 (2.50 to 2.70) | 1.30 |" in shown and "sglang, 64 rows" in shown


def test_the_engines_are_read_from_a_kept_measurement(tables: ModuleType, results: Path):
    """Rows as benchmarks/generation.py writes them take the place of the transcribed ones."""
    from published import engines, write

    assert len(engines.decoded()) == 10
    rate = [1000.0, 1100.0, 1200.0]
    rows = [
        {
            "side": side,
            "model": model,
            "lora_rank": rank,
            "load": name,
            "whole_tokens_per_s": rate,
            "whole_s": rate,
        }
        for side, model, rank in (("woodshed", "7b", 0), ("vllm", "7b", 0), ("woodshed", "Qwen2.5-0.5B", 0))
        for name in ("128", "agent")
    ]
    rows[0] |= {"decode_tokens_per_s": [2200.0] * 3, "gap_max": 0.5, "unequal": 3, "compared": 4096}
    change(results / "generation_h200.json", lambda found: (found.clear(), found.update(rows=rows)))
    write.load.cache_clear()
    one, agent = engines.decoded()
    assert (one.what, one.is_small, one.num_rows) == ("7B, 128 rows, prompt 512", False, 128)
    assert agent.ours == rate and "| 2.00 |" in engines.decode()
    assert "1 load(s): 3 of 4,096 tokens differ | 0.500 |" in engines.agreement()


def test_bars_are_judged_and_the_default_is_named(tables: ModuleType, results: Path):
    from published import engines, write

    assert engines.hint_cost().count("**the default**") == 1
    rows = [{"what": "RL alone", "added": 0.0}, {"what": "the settings' defaults", "added": 0.04}]
    rows += [{"what": "ema, separate", "added": 1.26}, {"what": "RL alone, again", "added": 0.01}]
    change(results / "targeted_step.json", lambda found: found.update(rows=rows))
    write.load.cache_clear()
    assert engines.hint_cost().splitlines()[2:] == [
        "| the settings' defaults: **the default** | +4.0 % | met |",
        "| ema, separate | +126.0 % | **missed** |",
    ]


def test_what_the_prose_says_of_the_tables_holds(tables: ModuleType):
    """Sentences of README.md and docs/results.md that rank or deny, each against its file: change both together."""
    from published import engines
    from published.write import load

    arms = load("targeted_feedback")["comparison"]
    changes, name = {}, ""
    for row in arms["table"][1:]:
        name = row[0] or name
        changes[name, row[2]] = [float(end) for end in re.findall(r"[-+][\d.]+", row[5])]
        changes[name, row[2], "after"] = [float(row[4].rstrip("%"))]
    for arm in ("rl", "kl-ema", "penalty"):
        assert changes[arm, "solve rate"][1] < 0 < changes[arm, "solve rate"][2], "no arm solves clearly more"
    rate = "invalid-call rate"
    assert changes["penalty", rate, "after"] <= changes["kl-ema", rate, "after"], (
        "a penalty does at least as well"
    )
    rewards = {
        row[0]: [float(end) for end in re.findall(r"[-+][\d.]+", row[4])] for row in arms["against"][1:]
    }
    assert rewards["kl-ema"][2] < 0, "feedback earns clearly less reward than RL alone"
    for found in engines.decoded():
        is_quicker = found.ours[1] > found.other[1]
        assert is_quicker == (found.is_small and found.num_rows >= 128), (
            "quicker where a small model fills a batch"
        )
    cheap = [line for line in engines.hint_cost().splitlines() if line.endswith("| met |")]
    assert cheap and all(line.startswith("| live") for line in cheap), "only a live teacher meets the bar"
    steps = [load(name)["rows"][0] for name in ("muon_step", "muon_step_2_cards")]
    assert all(row["ms"]["dion"] < row["ms"]["ours"] for row in steps), "dion is a little quicker"
    assert all(row["ceilings"]["transfers_ms"] == 0 for row in steps), "transfers were never timed"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "<!-- table: headlines --><!-- end -->",
            "nobody makes the table 'headlines'; there are against-rl, ",
        ),
        ("<!-- table: headline -->", "headline --> has no other half"),
        ("x <!-- end --> y", "end --> has no other half"),
        (
            "<!-- table: headline --> <!-- figure: memory -->1<!-- end -->",
            "'headline' is not closed before the next",
        ),
    ],
)
def test_a_mark_that_is_wrong_is_named(tables: ModuleType, text: str, reason: str):
    with pytest.raises(tables.BlockError, match=reason):
        tables.fill(text)


def test_the_command_says_what_differs():
    done = subprocess.run(
        [sys.executable, "benchmarks/tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_first_page_has_one_small_table_with_its_terms_and_a_loss():
    text = (ROOT / "README.md").read_text("utf-8")
    screen = text.partition("\n## ")[0]
    rows = [line for line in screen.splitlines() if line.startswith("| ")]
    assert 3 <= len(rows) <= 7, "a header, a rule and at most five rows"
    for term in ("**Invalid-call rate**:", "**Solve rate**:", "**Reward**:"):
        assert term in screen
    assert "better than feedback here" in screen


def test_what_was_copied_from_prose_says_so():
    """A file without raw output names where its figures stood, and every kept file says what it ran on."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        found = json.loads(path.read_text("utf-8"))
        if {"machine", "hardware", "card"} & set(found):
            assert "source" not in found or re.search(
                r"commit [0-9a-f]{7}; raw output not kept", found["source"]
            )
        else:
            assert re.search(r"at commit [0-9a-f]{7}; raw output not kept", found["source"]), path.name


def test_the_quickstart_promises_the_minutes_that_were_measured():
    """Its first line on the screen; the README's figures come from the measurements."""
    promised = re.sub(r"\s+", " ", (ROOT / "scripts" / "quickstart").read_text("utf-8"))
    readme = (ROOT / "README.md").read_text("utf-8")
    for figure in ("duration", "busy-duration"):
        found = re.search(f"<!-- figure: {figure} -->(.*?)<!-- end -->", readme, re.S)
        assert found and found[1] in promised, figure
    assert not re.search(r"stage .*minutes\)", promised), "a stage says what is left by the pace so far"
