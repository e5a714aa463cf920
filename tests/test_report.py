"""The page of runs: what is on it, what hostile text does (nothing), and runs that stopped half-way."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import random
import re
import resource
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from lifelike import Shape, make_run

from woodshed import report
from woodshed.evals import conclusion, evaluation, ledger, measures, statistics
from woodshed.records import (
    CALL_FAULTS,
    Call,
    Hint,
    Observation,
    Patch,
    RewardTerms,
    Rollout,
    RunError,
    TokenDivergence,
    Turn,
    Verdict,
)
from woodshed.report import curves, effort_chart, terms, transcripts, variants, visible, words
from woodshed.report.gather import RunRecords, gather
from woodshed.report.transcripts import Archives
from woodshed.report.turn_text import SIGNS
from woodshed.runs.folder import RunDir

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\x1b]8;;http://x\x07 &amp; \u202egnp.exe"
)
HARMLESS = (
    "html head meta title style body header nav h1 h2 h3 p div span ul li table tr th td small code pre "
    "dl dt dd details summary b q a button input label select option article figure figcaption "
    "dialog form kbd noscript script"
)
RECIPE = 'name = "first"\nnote = "Half of the faults were seeded."\n\n[rl]\nsteps = 2\n'


def turn(text: str = "fine", fault: bool = False) -> Turn:
    kind = "unknown_tool" if fault else None
    call = Call("1", "shell", {}, text, kind)
    return Turn(
        (1,),
        1,
        (2, 3),
        (-0.5, -0.25),
        ((0, 2),),
        "stop",
        text,
        (call,),
        (Observation("1", text, kind),),
        kind,
    )


def attempt(phase: str, step: int, task: str, *turns: Turn) -> tuple[Rollout, Verdict]:
    name = f"{phase}-{step}-{task}-0"
    made = Rollout(name, task, task, 0, 0, turns, Patch({"a.py": "x"}, diff=turns[0].text), "finished", 1.0)
    outcomes = {"tests/test_a.py::test_one": "failed"}
    return made, Verdict(name, task, "graded", 0.0, False, outcomes, ("sentinel passed",), turns[0].text)  # type: ignore[arg-type]


def fill(run: RunDir, phase: str, step: int, *made: tuple[Rollout, Verdict]) -> None:
    run.append("rollouts", [rollout for rollout, _ in made], phase, step)
    run.append("verdicts", [verdict for _, verdict in made], phase, step)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "first", recipe=RECIPE, manifest={"python": "3.11", "gpus": ["none"]})


class Tags(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def unpack(text: str, name: str) -> bytes:
    """What an element of packed data holds."""
    found = re.search(rf'<script type="text/plain" id="{name}">(.*?)</script>', text)
    assert found, f"no element {name}"
    return zlib.decompress(base64.b64decode(found[1]))


def test_a_finished_run(run: RunDir):
    tasks = "abcdefgh"
    fill(run, "eval", 0, *(attempt("eval", 0, task, turn("no", fault=True), turn()) for task in tasks))
    fill(run, "eval", 2, *(attempt("eval", 2, task, turn(), turn()) for task in tasks))
    for step in range(2):
        run.append(
            "metrics", [{"rl_grad_norm": 0.5, "invalid_calls": {"value": 0.4 - step / 5}}], "train", step
        )
    run.append("hints", [Hint("eval-0-a-0", 0, "unknown_tool", "Reminder: the tools are ...")], "eval", 0)
    text = report.write(run).read_text("utf-8")
    assert "finished, 2 steps" in text and "Half of the faults were seeded." in text
    headline = re.search(
        r"invalid-call rate</a></td><td[^>]*>50.0% \[.*?8 / 16 turns.*?0 / 16 turns.*?-50.0 pp", text, re.S
    )
    assert headline, "the headline compares the first and the last evaluation"
    assert "Worst: least reward, most faults" in text and "sentinel passed" in text
    rows = json.loads(unpack(text, "rows"))
    first = dict(zip(rows["columns"], rows["rows"][0], strict=True))
    assert (first["id"], first["faults"], first["hints"]) == (
        "eval-0-a-0",
        {"unknown_tool": 1},
        ["unknown_tool"],
    )
    archive = json.loads(unpack(text, f"a{first['archive']}"))
    packed = archive["r"][first["archive_index"]]
    assert archive["s"][packed["t"][0]["m"]] == "no" and packed["t"][0]["e"] == "unknown_tool"
    assert archive["s"][packed["t"][0]["h"][0][1]] == "Reminder: the tools are ..."


def test_alarms_over_a_run_stand_on_its_page(run: RunDir):
    for step in range(4):
        fill(run, "train", step, attempt("train", step, "a", *[turn()] * 40))
    assert "differs from the steps before" not in report.write(run).read_text("utf-8")
    reads = dataclasses.replace(turn(), calls=(Call("1", "read_file", {}, ""),))
    fill(run, "train", 4, attempt("train", 4, "a", *[reads] * 40))
    text = report.write(run).read_text("utf-8")
    assert "<td>step 4</td><td>tools</td><td>read_file makes 100% of the calls, before 0%</td>" in text


def test_hostile_text_is_shown_and_never_executed(run: RunDir):
    fill(run, "eval", 0, attempt("eval", 0, HOSTILE, turn(HOSTILE, fault=True)))
    run.append("hints", [Hint(f"eval-0-{HOSTILE}-0", 0, HOSTILE, HOSTILE)], "eval", 0)
    for step in range(2):
        run.append("metrics", [{HOSTILE: 1.0, "faults": {HOSTILE: 0.5 * step}}], "train", step)
    run.append("metrics", [{HOSTILE: 1.0}], HOSTILE, 0)
    text = report.write(run).read_text("utf-8")
    tags = Tags(text).seen
    assert {tag for tag, _ in tags} <= set(HARMLESS.split())
    assert not [
        name for _, attributes in tags for name in attributes if name.startswith("on") or name == "src"
    ]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\u241b[31mred" in text and "\\u202egnp.exe" in text and "\x1b" not in text
    policy = next(a["content"] or "" for tag, a in tags if tag == "meta" and "http-equiv" in a)
    nonce = re.search(r"script-src 'nonce-([\w-]{16,})'", policy)
    assert nonce and "default-src 'none'" in policy and "connect-src" not in policy
    running = [a for tag, a in tags if tag == "script" and "type" not in a]
    assert len(running) == 2 and all(a["nonce"] == nonce[1] for a in running)
    figure = next(
        f for f in json.loads(text.split('id="figures">')[1].split("</script>")[0]) if "name" in f["data"][0]
    )
    assert "<" not in json.dumps(figure)


def test_nothing_is_fetched(run: RunDir):
    fill(run, "eval", 0, attempt("eval", 0, "a", turn()))
    text = report.write(run).read_text("utf-8")
    assert not re.search(r"""src=|href="(?!#)|url\(|@import|fetch\(|XMLHttp""", text)


@pytest.mark.parametrize("stage", ["empty", "rollouts", "torn", "no manifest"])
def test_a_run_that_stopped_half_way(run: RunDir, stage: str):
    made, _ = attempt("eval", 0, "a", turn())
    if stage != "empty":
        run.append("rollouts", [made], "eval", 0)
        run.append("metrics", [{"rl_loss": float("nan"), "rl_grad_norm": 1.0}], "train", 0)
    if stage == "torn":
        with (run.path / "verdicts.jsonl").open("a") as file:
            file.write('{"phase": "eval", "st')
    if stage == "no manifest":
        (run.path / "manifest.json").unlink()
    text = report.write(run).read_text("utf-8")
    assert (
        "0" if stage == "empty" else "1"
    ) + " of 2 steps done; resume with `woodshed train --resume" in text
    assert stage == "empty" or "not judged" in unpack(text, "rows").decode()


def test_what_cannot_be_read_is_a_line_on_the_page_and_the_rest_is_there(run: RunDir):
    """A batch of another version, one with a damaged line in its middle, a damaged manifest."""
    for number, task in enumerate("abc"):
        made = [attempt("eval", 0, task, turn(f"by {task}"))]
        run.append("rollouts", [rollout for rollout, _ in made], "eval", 0, part=number)
        run.append("verdicts", [verdict for _, verdict in made], "eval", 0, part=number)
    path = run.path / "rollouts.jsonl"
    text = (
        path.read_text().replace('"turns"', '"rounds"', 1).replace('{"id": "eval-0-b', '{"id": "eval-0-b', 1)
    )
    path.write_text(text.replace('"record": {"id": "eval-0-b', '"record": {"id: "eval-0-b', 1))
    (run.path / "manifest.json").write_text("{")
    problems: list[str] = []
    text = report.write(RunDir.open(run.path), problems=problems).read_text("utf-8")
    assert len(problems) == 3 and "3 parts of first could not be read and are missing here" in text
    assert "Rollout has no field &#39;rounds&#39;" in text and "manifest.json cannot be read" in text
    rows = json.loads(unpack(text, "rows"))
    assert [row[rows["columns"].index("id")] for row in rows["rows"]] == ["eval-0-c-0"]


def test_a_page_that_cannot_be_written_says_what_helps(run: RunDir, tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RunError, match=r"written: File too large\. To have it, raise .*ulimit -f"):
            report.write(run, path=tmp_path / "report.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "report.html").exists()


def test_numbers_beyond_64_bits_stop_no_report(run: RunDir):
    """As orjson reads them, as the standard library does (a line with a lone surrogate), and beyond any float."""
    fill(run, "eval", 0, attempt("eval", 0, "a", turn()), attempt("eval", 0, "b", turn("\udcff")))
    path = run.path / "rollouts.jsonl"
    text = path.read_text("utf-8", "surrogatepass").replace('"attempt": 0', f'"attempt": {2**70}')
    text = text.replace('"versions": [[0', f'"versions": [[{2**60}').replace(
        '"seed": 0', f'"seed": {10**400}'
    )
    path.write_text(text.replace("-0.25", "-" + "9" * 400), "utf-8", "surrogatepass")
    for step in range(2):
        run.append(
            "metrics",
            [{"entropy": 10**400, "reward": {"value": 2**80, "low": 0, "high": "?"}}],
            "train",
            step,
        )
    problems: list[str] = []
    report.write(RunDir.open(run.path), problems=problems)
    assert len(problems) == 1 and "rollouts.jsonl, eval 0 part 0" in problems[0]


def test_texts_that_json_cannot_carry_are_still_shown(run: RunDir):
    """Lone surrogates come out of files that were never text."""
    fill(run, "eval", 0, attempt("eval", 0, "a\udcff", turn("broken \udcff here")))
    text = report.write(run).read_text("utf-8")
    assert "broken \ufffd here" in json.loads(unpack(text, "a0"))["s"]


# --- transcripts --------------------------------------------------------------------------------------------------


def with_ids(text: str, ids: tuple[int, ...]) -> Turn:
    return dataclasses.replace(turn(text), sampled_ids=ids, logps=(-0.5,) * len(ids))


def test_every_token_knows_its_stretch_of_the_message():
    token_texts = {1: "def", 2: " f", 3: "\ufffd", 4: "\ufffd\ufffd", 5: ":", 6: ""}
    assert transcripts.texts_of_tokens(with_ids("def f:", (1, 2, 5, 6)), token_texts) == [
        "def",
        " f",
        ":",
        "",
    ]
    split = with_ids("def\N{OWL}:", (1, 3, 4, 5, 6))
    assert transcripts.texts_of_tokens(split, token_texts) == ["def", "\N{OWL}", "", ":", ""]
    assert transcripts.token_lengths(split, token_texts) == "".join(
        chr(35 + n) for n in (3, 2, 0, 1, 0)
    )  # UTF-16
    assert transcripts.texts_of_tokens(with_ids("\N{OWL}", (3, 4)), token_texts) == ["\N{OWL}", ""]
    assert transcripts.texts_of_tokens(with_ids("something else", (1, 2)), token_texts) is None
    assert transcripts.token_lengths(with_ids("def", (1,)), {}) == ""


def test_levels_keep_what_a_person_can_see():
    values = -np.logspace(-4, 1.2, 200)
    back = (np.frombuffer(transcripts.characters(values.tolist()).encode(), np.uint8) - 35.0) / 20
    assert (
        np.abs(back**2 + values) <= 0.05 * np.sqrt(-values) + 0.001
    ).all()  # 0.05 nats at one nat, 0.006 at .01
    assert transcripts.characters([float("-inf"), float("nan"), 0.0]) == chr(125) * 2 + "#"


def test_the_word_index_finds_what_a_search_of_every_text_finds():
    draw = random.Random(0)
    known = [f"word_{draw.randrange(60)}" for _ in range(40)]
    texts = [" ".join(draw.choices(known, k=12)) for _ in range(300)]
    index = words.WordIndex()
    for number, text in enumerate(texts):
        index.add(number, words.words(text))
    listed, packed = index.pack()
    ordered = listed.decode().split("\n")
    table = np.frombuffer(packed, np.uint8)

    def numbers(planes: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(planes.reshape(4, -1).T).view("<u4").ravel()

    counts = numbers(table[: 4 * len(ordered)])
    gaps = np.split(numbers(table[4 * len(ordered) :]), np.cumsum(counts)[:-1])
    for word, found in zip(ordered, gaps, strict=True):
        assert np.cumsum(found).tolist() == [n for n, text in enumerate(texts) if word in text.split()]


def test_a_page_that_is_full_lists_what_it_leaves_out(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    fill(run, "eval", 0, *(attempt("eval", 0, task, turn(task * 50)) for task in "abcd"))
    monkeypatch.setattr(transcripts, "MAX_BYTES", 700)
    text = report.write(run).read_text("utf-8")
    left_out = re.search(r"(\d) of 4 transcripts did not fit", text)
    assert left_out and 0 < int(left_out[1]) < 4
    assert len(json.loads(unpack(text, "rows"))["rows"]) == 4


# --- variants and curves --------------------------------------------------------------------------------------------


def story_of(path: Path, number: int, *, weight: float = 1.0, seed: int = 0) -> RunRecords:
    settings = f"[feedback]\nweight = {weight}"
    return gather(make_run(path, Shape(), seed=seed, settings=settings), number, Archives())


def test_runs_that_differ_in_seed_only_are_one_arm(tmp_path: Path):
    stories = [
        story_of(tmp_path / f"{weight}-{seed}", n, weight=weight, seed=seed)
        for n, (weight, seed) in enumerate([(1.0, 0), (0.0, 0), (1.0, 1)])
    ]
    found = variants.by_recipe([[story] for story in stories])
    assert [(variant.name, len(variant.runs)) for variant in found] == [
        ("feedback.weight = 1.0", 2),
        ("feedback.weight = 0.0", 1),
    ]
    joined = variants.by_recipe([stories[:2], stories[2:]])
    assert [[story.name for story in variant.runs] for variant in joined] == [["1.0-0", "0.0-0"], ["1.0-1"]]
    constant: list[str] = []
    drawn = {chart.title: chart.figure for chart in curves.charts(found, constant)}
    lines = [trace for trace in drawn["targeted divergence"]["data"] if trace.get("name")]
    assert [trace["name"] for trace in lines] == [variant.name for variant in found]
    gains = {f"hint gain by class, nats a turn: {variant.name}" for variant in found}
    assert {*gains, "sampled tokens a second"} <= set(drawn)
    assert "flagged rollouts: 0.25" in constant, "what never changes is not drawn"


def test_seeds_are_a_level_above_the_tasks(tmp_path: Path):
    """The figures of an variant are those that comparing its runs gives, and each seed's own stands beside them."""
    stories = [story_of(tmp_path / str(seed), seed, seed=seed) for seed in range(3)]
    (variant,) = variants.by_recipe([[story] for story in stories])
    evaluations = [evaluation.from_run(RunDir.open(story.path)) for story in stories]
    sides = [[found[side].graded for found in evaluations] for side in (0, -1)]
    expected = {row.measure.key: row for row in measures.compare_seeds(*sides)}
    for row in variants.rows(variant, measures.MEASURES):
        other = expected[row.measure.key]
        assert (row.before, row.after, row.change) == (other.before, other.after, other.change)
        alone = [found[0].summary.estimates[row.measure.key].value for found in evaluations]
        assert list(row.seeds[0]) == alone
    flagged = next(row for row in variants.rows(variant, measures.MEASURES) if row.measure.key == "flagged")
    assert flagged.before.part == 3, "one flag an evaluation"
    text = report.write(*(RunDir.open(story.path) for story in stories)).read_text("utf-8")
    assert "(3 seeds)" in text and "over seeds and tasks" in text and "by seed" in text
    detectable = [
        row
        for row in variants.rows(variant, measures.MEASURES)
        if row.change and row.change.detectable is not None
    ]
    assert detectable and text.count("smallest detectable") >= len(detectable)


def test_seeds_of_which_one_is_still_at_work(tmp_path: Path):
    stories = [story_of(tmp_path / str(seed), seed, seed=seed) for seed in range(2)]
    going = dataclasses.replace(
        stories[1], lines=tuple(line for line in stories[1].lines if line.phase != "eval" or line.step == 0)
    )
    (variant,) = variants.by_recipe([[stories[0]], [going]])
    before, after = variant.sides()
    assert len(before) == len(after) == 1
    (early,) = variants.by_recipe([[dataclasses.replace(story, lines=going.lines) for story in stories]])
    assert [len(side) for side in early.sides()] == [2, 0]


def test_a_copy_is_no_seed_and_a_run_is_named_once(tmp_path: Path):
    first, second = (make_run(tmp_path / name, Shape()) for name in ("a", "b"))
    assert (
        "1 of these 2 runs repeats the recipe and seed of another" in report.write(first, second).read_text()
    )
    with pytest.raises(RunError, match="is named twice"):
        report.write([first, second], RunDir.open(tmp_path / "b" / ".." / "a"))


def test_arms_whose_scores_were_made_differently_are_not_set_against_each_other(tmp_path: Path):
    runs = [make_run(tmp_path / str(w), Shape(), settings=f"[feedback]\nweight = {w}") for w in (1.0, 0.0)]
    assert "<th>against feedback.weight = 1.0</th>" in report.write(*runs).read_text("utf-8")
    for run, turns in zip(runs, (6, 12), strict=True):
        run.write_manifest(run.manifest | {"score": {"agent": {"max_turns": turns}}})
    text = report.write(*runs).read_text("utf-8")
    assert "Not compared with feedback.weight = 1.0: scores were made under different conditions" in text
    assert "max_turns: 6 against 12" in text and "<th>against" not in text


def test_effort_stands_against_difficulty_where_tasks_differ(run: RunDir):
    """The hard tasks take two turns, the solved ones one."""
    easy = [attempt("eval", 0, task, turn()) for task in "ab"]
    hard = [attempt("eval", 0, task, turn(), turn()) for task in "cde"]
    solved = [(made, dataclasses.replace(verdict, solved=True, reward=1.0)) for made, verdict in easy]
    fill(run, "eval", 0, *hard)
    assert "Effort against difficulty" not in report.write(run).read_text("utf-8")
    fill(run, "eval", 2, *hard, *solved)
    text = report.write(run).read_text("utf-8")
    assert (
        "<td>0.0 to 0.25</td><td>2</td><td>2.00" in text and "<td>0.75 to 1.0</td><td>3</td><td>4.00" in text
    )
    assert "Rank correlation of difficulty and tokens: 1.00" in text


def test_costs_and_behaviour_stand_below_the_headline(tmp_path: Path):
    run = make_run(tmp_path / "small", Shape())
    text = report.write(run).read_text("utf-8")
    books = ledger.from_run(run)
    assert gather(run, 0, Archives()).ledger == books
    for row in ledger.table(books, ledger.costs(books, [])):
        if row[0] in ("sampled tokens", "total"):
            assert f"<th>{row[0]}</th><td>{row[2] or row[1]}</td>" in text
    assert all(f"<th>{name}</th>" in text for name, _ in ledger.brief(books, ledger.costs(books, [])))
    summary = evaluation.from_run(run)[0].summary
    for measure in measures.BEHAVIOUR:
        figure = measures.write_estimate(measure, summary.behaviour[measure.key])
        assert figure == "-" or (f">{measure.label}</a></td>" in text and f">{figure}<small>" in text), (
            measure.key
        )


def test_every_figure_is_one_that_plotly_knows(tmp_path: Path):
    objects = pytest.importorskip("plotly.graph_objects")
    run = make_run(tmp_path / "small", Shape())
    story = gather(run, 0, Archives())
    charts = [*curves.charts(variants.by_recipe([[story]])), *curves.curriculum_maps([story])]
    assert len(charts) > 10
    for chart in charts:
        objects.Figure(chart.figure)  # raises on a property that does not exist


def test_a_band_is_the_range_of_seeds_or_the_interval_of_one():
    one = {0: (0.5, 0.4, 0.6), 1: (0.3, None, None), 2: (float("nan"), None, None)}
    assert curves.average([one]) == {0: (0.5, 0.4, 0.6), 1: (0.3, None, None)}
    assert curves.average([one, {0: (0.7, 0.6, 0.8)}]) == {0: (0.6, 0.5, 0.7), 1: (0.3, None, None)}
    assert curves.chart("nothing", [("", 0, 0, {0: (0.5, None, None)})]) is None
    assert [curves.short(v) for v in (0.0, 412.3, 0.03125, 3.1e-7, float("inf"))] == [
        "0", "412", "0.0312", "3.1e-07", "inf"
    ]  # fmt: skip


def test_intervals_are_drawn_only_where_something_was_measured():
    """A bar at each of two evaluations, with nothing between them; a band over steps that follow one another."""
    apart = curves.chart("x", [("", 0, 0, {0: (0.5, 0.4, 0.7), 80: (0.1, 0.0, 0.2)})], unit="share")
    assert apart is not None
    (line,) = apart.figure["data"]
    assert line["error_y"]["array"] == [0.2, 0.1] and line["error_y"]["arrayminus"] == [0.1, 0.1]
    assert (
        apart.figure["layout"]["yaxis"] | {"range": [0, 1], "tickformat": ".0%"}
        == apart.figure["layout"]["yaxis"]
    )
    close = curves.chart("x", [("", 0, 0, {step: (step, step - 1.0, step + 1.0) for step in range(20)})])
    assert close is not None and "error_y" not in close.figure["data"][1]
    band = close.figure["data"][0]
    assert (
        band["fill"] == "toself" and len(band["x"]) == 40 and "range" not in close.figure["layout"]["yaxis"]
    )


def test_lines_of_a_chart_differ_by_more_than_a_colour():
    means = [(str(n), n, 0, {0: (0.0, None, None), 1: (float(n), None, None)}) for n in range(20)]
    drawn = curves.chart("x", means)
    assert drawn is not None
    looks = [(t["line"]["color"], t["line"]["dash"], t["marker"]["symbol"]) for t in drawn.figure["data"]]
    assert len(set(looks)) == 20 and len({look[1:] for look in looks[:8]}) == 8


def rgb(text: str) -> np.ndarray:
    """Linear light of a colour."""
    channels = np.array([int(text[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(light: np.ndarray) -> np.ndarray:
    """Perceived place of a colour (Ottosson 2020), in which distances of 0.1 are plain to see."""
    cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    places = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return np.array(places) @ np.cbrt(np.array(cones) @ light)


SIGHT = {  # Machado et al. (2009): linear light as it reaches people without one kind of cones
    "usual": np.eye(3),
    "protan": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deutan": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9690]],
    "tritan": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


@pytest.mark.parametrize("theme", ["day", "night"])
def test_colours_of_lines_can_be_told_apart_and_seen(theme: str):
    script = (Path(curves.__file__).parent / "charts.js").read_text()
    night = dict(re.findall(r'"(#\w{6})": "(#\w{6})"', script))
    assert set(night) == set(curves.COLOURS)
    chosen = list(night) if theme == "day" else list(night.values())
    for sight, matrix in SIGHT.items():
        seen = [oklab(np.clip(np.array(matrix) @ rgb(colour), 0, 1)) for colour in chosen]
        least = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))
        assert least > (0.15 if sight == "usual" else 0.07), (sight, least)
    paper = rgb("#ffffff" if theme == "day" else "#14171c") @ [0.2126, 0.7152, 0.0722]
    for colour in chosen:
        light = rgb(colour) @ [0.2126, 0.7152, 0.0722]
        assert (max(light, paper) + 0.05) / (min(light, paper) + 0.05) > 3, colour


def test_every_word_of_a_page_is_defined_behind_it(tmp_path: Path):
    run = make_run(tmp_path / "small", Shape(tasks=6))
    text = report.write(run).read_text("utf-8")
    for figure in (*measures.MEASURES, *measures.BEHAVIOUR, measures.pass_figure("pass@4")):
        assert terms.key_of(figure.label) in terms.TERMS, figure.label
    assert set(CALL_FAULTS) <= set(terms.TERMS)
    tags = Tags(text).seen
    words = [attributes for tag, attributes in tags if tag == "a" and attributes.get("class") == "term"]
    places = {attributes.get("id") for _, attributes in tags}
    assert len(words) > 30
    assert all(word["href"] in {f"#{place}" for place in places} and word["title"] for word in words)
    charts = text.count("<figcaption>")
    assert charts > 5 and text.count("<small></small>") == 0


def row_of(before: list[float], after: list[float], key: str = "solved") -> variants.VariantRow:
    """One attempt at each task on both sides."""
    measure = next(measure for measure in measures.MEASURES if measure.key == key)
    sums = [{str(n): (value, 1.0) for n, value in enumerate(side)} for side in (before, after)]
    sides = [statistics.rate(side, [1.0] * len(side), range(len(side))) for side in (before, after)]
    return variants.VariantRow(measure, sides[0], sides[1], statistics.difference(*sums, is_share=True), ())


def test_intervals_that_do_not_touch_beside_no_change_are_explained():
    """Of six tasks four lost much and two nothing: each side is known well, and four may be chance."""
    row = row_of([0.98, 1.0, 0.97, 0.98, 0.97, 0.98], [0.0, 1.0, 0.3, 0.98, 0.35, 0.9], key="reward")
    assert row.after and row.change and row.before.low is not None and row.after.high is not None
    assert row.before.low > row.after.high and not row.change.is_clear
    said = "the intervals do not touch, but only 4 of 6 tasks changed, and fewer than 6 may be chance"
    assert conclusion.why_unclear(row) == said
    assert conclusion.why_unclear(row_of([0.0] * 9, [1.0] * 9)) == "", "shown"
    assert conclusion.why_unclear(row_of([0.0] * 5 + [1.0] * 4, [1.0] * 4 + [0.0] * 5)) == "", "they touch"


def test_a_page_begins_with_what_it_shows(run: RunDir):
    """A win, a loss, a null result, a single evaluation: the same sentence as everywhere else."""
    tasks = "abcdefgh"
    good, bad = [turn(), turn()], [turn("no", fault=True), turn()]

    def page(after: list[Turn] | None, before: list[Turn]) -> str:
        fill(run, "eval", 0, *(attempt("eval", 0, task, *before) for task in tasks))
        if after is not None:
            fill(run, "eval", 2, *(attempt("eval", 2, task, *after) for task in tasks))
        text = report.write(run).read_text("utf-8")
        lines = re.findall(r"<p[^>]*>(.*?)</p>", text.partition("</header>")[2])
        return lines[0]

    assert page(None, bad).startswith("Measured once, so nothing is compared: solve rate 0.0% [")
    rest = "solve rate (0 of 8 before, 0 of 8 after) and mean reward (0.00 before, 0.00 after)"
    assert page(good, bad) == (
        "Better beyond noise: invalid-call rate fell from 50.0% to 0.0%. Nothing got worse beyond noise. "
        f"Within noise: {rest}. 8 tasks, 1 seed."
    )
    assert page(bad, good) == (
        "Worse beyond noise: invalid-call rate rose from 0.0% to 50.0%. Nothing got better beyond noise. "
        f"Within noise: {rest}. 8 tasks, 1 seed."
    )
    assert page(good, good).startswith("Nothing moved beyond noise. Within noise: solve rate (0 of 8 before")


def test_a_share_of_the_reward_has_a_mark_of_its_own(run: RunDir):
    made, verdict = attempt("eval", 0, "a", turn())
    fill(run, "eval", 0, (made, dataclasses.replace(verdict, reward=0.5)))
    rows = json.loads(unpack(report.write(run).read_text("utf-8"), "rows"))
    assert dict(zip(rows["columns"], rows["rows"][0], strict=True))["result"] == "partly"
    script = (Path(curves.__file__).parent / "viewer.js").read_text()
    signs = dict(re.findall(r'(\w+|"not judged"): "(.*?)"', re.search(r"const SIGNS = \{(.*?)\}", script)[1]))  # type: ignore[index]
    shown = {name: sign.encode().decode("unicode_escape") for name, sign in signs.items()}
    assert {name.strip('"'): sign for name, sign in shown.items()} == SIGNS and len(
        set(SIGNS.values())
    ) == len(SIGNS)


def test_hint_gain_by_class_comes_from_the_lessons(run: RunDir):
    token_divergences = [
        TokenDivergence("r", n, "no_call", (-1.0,), (teacher,), (0.1,))
        for n, teacher in enumerate((-4.0, -2.0))
    ]
    run.append("divergences", token_divergences, "train", 0)
    assert gather(run, 0, Archives()).gains == {"no_call": {0: -2.0}}


def test_every_hidden_character_becomes_visible():
    assert visible.visible("a\nb\tc") == "a\nb\tc"
    assert visible.visible("\x00\x07\x7f\u200b") == "\u2400\u2407\u2421\\u200b"
    assert visible.label("<a href='x'>\x1b") == "&lt;a href='x'&gt;\u241b"


def test_reward_stands_against_tokens_for_each_level_of_effort(tmp_path: Path):
    run = make_run(tmp_path / "run", Shape())
    assert effort_chart.charts([gather(run, 0, Archives())]) == []
    practised = [line for line in gather(run, 0, Archives()).lines if line.phase == "train"]
    asked = dict(zip((line.id for line in practised), itertools.cycle(("low", "high")), strict=False))
    run.append("reward_terms", [RewardTerms(name, {}, level) for name, level in asked.items()], "train", 9)
    record = gather(run, 0, Archives())
    (chart,) = effort_chart.charts([record])
    low, high = chart.figure["data"]
    assert (low["name"], high["name"]) == ("low", "high") and low["x"] == sorted(low["x"])
    own = [
        line for line in record.lines if line.effort == "low" and line.reward is not None and not line.is_void
    ]
    assert len(low["x"]) == min(5, len(own) // 4)
    few = [dataclasses.replace(own[0], tokens=n, reward=n / 10) for n in range(9)]
    assert effort_chart.points_of(few) == [(1.5, pytest.approx(0.15)), (6.0, pytest.approx(0.6))]
    assert effort_chart.points_of([]) == []
