"""The page of a run: what is on it, what hostile text does (nothing), and runs that stopped half-way."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from woodshed import report
from woodshed.records import Call, Hint, Observation, Patch, Rollout, RunError, Turn, Verdict
from woodshed.report import curves, page
from woodshed.rundir import RunDir

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\x1b]8;;http://x\x07 &amp; \u202egnp.exe"
)
HARMLESS = (
    "html head meta title style body h1 h2 h3 p div span table tr th td small code pre details summary b "
    "figure figcaption svg line text polyline circle"
)
RECIPE = 'name = "first"\nnote = "Half of the faults were seeded."\n\n[training]\nsteps = 2\n'


def turn(text: str = "fine", fault: bool = False) -> Turn:
    kind = "unknown_tool" if fault else None
    call = Call("1", "shell", {}, text, kind)
    return Turn(
        (1,), 1, (2, 3), (-0.5, -0.25), 0, "stop", text, (call,), (Observation("1", text, kind),), kind
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
        r"invalid-call rate</td><td>50.0% \[.*?8 / 16 turns.*?0 / 16 turns.*?-50.0 pp", text, re.S
    )
    assert headline, "the headline compares the first and the last evaluation"
    assert "<polyline" in text and "Reminder: the tools are ..." in text and "sentinel passed" in text


def test_hostile_text_is_shown_and_never_executed(run: RunDir):
    fill(run, "eval", 0, attempt("eval", 0, HOSTILE, turn(HOSTILE, fault=True)))
    run.append("hints", [Hint(f"eval-0-{HOSTILE}-0", 0, HOSTILE, HOSTILE)], "eval", 0)
    run.append("metrics", [{HOSTILE: 1.0}], HOSTILE, 0)
    text = report.write(run).read_text("utf-8")
    tags = Tags(text).seen
    assert {tag for tag, _ in tags} <= set(HARMLESS.split())
    assert not [
        name for _, attributes in tags for name in attributes if name.startswith("on") or name == "src"
    ]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\u241b[31mred" in text and "\\u202egnp.exe" in text and "\x1b" not in text
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_nothing_is_fetched(run: RunDir):
    fill(run, "eval", 0, attempt("eval", 0, "a", turn()))
    text = report.write(run).read_text("utf-8")
    assert not re.search(r"""(src|href)=|url\(|@import""", text)


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
    ) + " of 2 steps done; go on with `woodshed train --resume" in text
    assert stage == "empty" or "not judged" in text


def test_a_run_of_another_version(run: RunDir):
    run.append("rollouts", [{"id": "x", "colour": "red"}], "eval", 0)
    with pytest.raises(RunError, match=r"Rollout has no field 'colour'.*manifest\.json"):
        report.write(run)
    assert not (run.path / "report.html").exists()


def test_curves():
    curve = curves.draw("rate", {"rate": [(0, 0.2), (5, float("nan")), (10, 0.1)]})
    assert curve is not None
    assert (curve.low, curve.high, curve.first_step, curve.last_step) == ("0", "0.2", 0, 10)
    assert curve.lines[0].points == f"0,0 {curves.WIDTH},{curves.HEIGHT / 2:g}"
    assert curves.draw("nothing", {"rate": [(0, float("nan"))]}) is None
    assert [curves.short(v) for v in (0.0, 412.3, 0.03125, 3.1e-7, float("inf"))] == [
        "0", "412", "0.0312", "3.1e-07", "inf"
    ]  # fmt: skip


def test_every_hidden_character_becomes_visible():
    assert page.visible("a\nb\tc") == "a\nb\tc"
    assert page.visible("\x00\x07\x7f\u200b") == "\u2400\u2407\u2421\\u200b"
