"""The page of runs: what is on it, what hostile text does (nothing), and runs that stopped half-way."""

from __future__ import annotations

import base64
import dataclasses
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
from woodshed.evals import evaluation, ledger, measures
from woodshed.records import Call, Hint, Observation, Patch, Rollout, RunError, TokenDivergence, Turn, Verdict
from woodshed.report import curves, transcripts, variants, visible, words
from woodshed.report.gather import RunRecords, gather
from woodshed.report.transcripts import Archives
from woodshed.runs.folder import RunDir

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\x1b]8;;http://x\x07 &amp; \u202egnp.exe"
)
HARMLESS = (
    "html head meta title style body header nav h1 h2 h3 p div span ul li table tr th td small code pre details "
    "summary b q a button input label select option article figure figcaption dialog form kbd noscript script"
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
        r"invalid-call rate</td><td[^>]*>50.0% \[.*?8 / 16 turns.*?0 / 16 turns.*?-50.0 pp", text, re.S
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
        run.append("metrics", [{HOSTILE: 1.0, "faults": {HOSTILE: 0.5}}], "train", step)
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
    drawn = {chart.title: chart.figure for chart in curves.charts(found)}
    lines = [trace for trace in drawn["targeted divergence"]["data"] if trace.get("name")]
    assert [trace["name"] for trace in lines] == [variant.name for variant in found]
    gains = {f"hint gain by class, nats a turn: {variant.name}" for variant in found}
    assert {*gains, "flagged rollouts", "sampled tokens a second"} <= set(drawn)


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
    assert text.count("smallest detectable") >= len(measures.MEASURES)


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
    summary = evaluation.from_run(run)[0].summary
    for measure in measures.BEHAVIOUR:
        figure = measures.write_estimate(measure, summary.behaviour[measure.key])
        assert figure == "-" or (f"<td>{measure.label}</td>" in text and f">{figure}<small>" in text), (
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
    assert curves.chart("nothing", [("", 0, 0, [{0: (0.5, None, None)}])]) is None
    assert [curves.short(v) for v in (0.0, 412.3, 0.03125, 3.1e-7, float("inf"))] == [
        "0", "412", "0.0312", "3.1e-07", "inf"
    ]  # fmt: skip


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
