"""The viewer in the terminal, driven by its keys without a screen."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from lifelike import Shape, make_run
from rich.text import Text
from textual.widgets import DataTable, Input, Static

from woodshed.records import Rollout, RunError, Verdict
from woodshed.report.turn_text import message_text
from woodshed.report.view import Reader, Viewer, marked, matches, unknown, view
from woodshed.runs.folder import RunDir

HOSTILE = "[bold red]no[/] [/nothing] \x1b[31mred\x1b]8;;http://x\x07 \u202egnp.exe"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("runs") / "small", Shape())


def drive(run: RunDir, play: Callable[[Viewer, Callable[..., Awaitable[None]]], Awaitable[None]]) -> None:
    """Run the viewer without a screen; `press` waits until everything has settled."""

    async def session() -> None:
        app = Viewer(Reader(run))
        async with app.run_test(size=(120, 40)) as pilot:

            async def press(*keys: str) -> None:
                await pilot.press(*keys)
                await app.workers.wait_for_complete()
                await pilot.pause()

            await press()
            await play(app, press)

    asyncio.run(session())


def text_of(node: Static) -> str:
    return str(node.visual)


def test_the_first_rollout_is_open_and_keys_move(run: RunDir):
    async def play(app: Viewer, press: Callable[..., Awaitable[None]]) -> None:
        assert len(app.rows) == 28 == app.query_one(DataTable).row_count
        assert app.opened is app.rows[0] and app.turn == 0
        await press("j", "j")
        assert app.turn == 2 and app.query_one(".turn.current").id == "turn-2"
        await press("k", "n")
        assert app.opened is app.rows[1] and app.turn == 0
        await press("p")
        assert app.opened is app.rows[0]

    drive(run, play)


def test_h_goes_to_the_next_turn_with_a_hint_and_shows_it_beside_its_turn(run: RunDir):
    async def play(app: Viewer, press: Callable[..., Awaitable[None]]) -> None:
        expected = [
            (row, t) for row in app.rows for t in sorted(app.reader.batch(row.batch_id)[row.index].hints)
        ]
        expected = [(row, turn) for row, turn in expected if (row, turn) != (app.rows[0], 0)]
        for row, turn in expected[:6]:
            await press("h")
            assert (app.opened, app.turn) == (row, turn)
            assert "Reminder: edit_file takes exactly" in text_of(app.query_one(f"#turn-{turn}", Static))
        await press("H")
        assert (app.opened, app.turn) == expected[4]

    drive(run, play)


def test_search_filters_as_the_page_does(run: RunDir):
    async def play(app: Viewer, press: Callable[..., Awaitable[None]]) -> None:
        await press("slash", *"has:hint phase:train")
        wanted = [row for row in app.rows if row.hints and row.batch_id[0] == "train"]
        assert app.query_one(Input).value == "has:hint phase:train"
        assert app.shown == wanted and app.query_one(DataTable).row_count == len(wanted) > 0
        await press("enter", "t")
        assert app.records is not None and app.turn in app.records.token_divergences
        await press("slash", *("backspace" for _ in "has:hint phase:train"), *"colour:red")
        said = text_of(app.query_one("#status", Static))
        assert said.startswith("0 of 28 rollouts. colour: is no filter, so colour:red is searched as text")
        await press(*("backspace" for _ in "colour:red"), *"edit_file", "enter", "o")
        assert app.order == "most reward first" and text_of(app.query_one("#status", Static)).endswith(
            "first"
        )
        rewards = [row.reward or 0.0 for row in app.shown]
        assert rewards == sorted(rewards, reverse=True)

    drive(run, play)
    shown = marked(Text("Call edit_file, then EDIT_FILE"), ["edit_file"])
    assert [(span.start, span.end) for span in shown.spans] == [(5, 14), (21, 30)]
    row = Reader(run).rows(run.batches("rollouts")[0])[0]
    assert matches(row, "is:" + row.result) and not matches(row, "is:void")
    assert (
        matches(row, "name_0 step:0")
        and not matches(row, "name_0 step:9")
        and not matches(row, "is:nonsense")
    )
    half = dataclasses.replace(row, reward=0.5, result="partly")
    for query, is_kept in (("reward:0.5", True), ("reward:>0.5", False), ("reward:<=.5 is:partly", True)):
        assert matches(half, query) is is_kept and not unknown(query)
    assert not matches(dataclasses.replace(row, reward=None), "reward:<9")
    assert "is: takes solved, partly" in unknown("is:nonsense")
    assert "reward: takes a number" in unknown("reward:much")


def test_colours_follow_the_probabilities(run: RunDir):
    reader = Reader(run)
    at = next(at for at in run.batches("rollouts") if at[0] == "train")
    story = next(s for s in reader.batch(at) if s.token_divergences)
    number, taught = next(iter(story.token_divergences.items()))
    turn = story.rollout.turns[number]
    shaded = {
        mode: message_text(turn, taught, reader.token_texts(at), mode)
        for mode in ("log-prob", "hint", "divergence", "none")
    }
    assert {text.plain for text in shaded.values()} == {turn.text}
    assert not shaded["none"].spans
    unlikely = sum(logp < -0.1 for logp in turn.logps)
    assert 0 < len(shaded["log-prob"].spans) <= unlikely + 1
    assert len(shaded["hint"].spans) >= len(turn.sampled_ids) // 3  # every third token lost 2.5 nats
    assert message_text(turn, taught, {}, "hint").plain == turn.text


def test_hostile_text_is_shown_and_neither_read_as_markup_nor_sent_to_the_terminal(tmp_path: Path):
    run = make_run(tmp_path / "hostile", Shape(tasks=1, steps=1, tasks_per_step=1, attempts=1, turns=1))
    at = run.batches("rollouts")[0]
    [made] = run.find("rollouts", Rollout, *at[:2]) or []
    seen = dataclasses.replace(made.turns[0].observations[0], text=HOSTILE)
    turn = dataclasses.replace(made.turns[0], text=HOSTILE, observations=(seen,), error_kind=None)
    made = dataclasses.replace(made, id=HOSTILE, task_name=HOSTILE, turns=(turn,))
    run.append("rollouts", [made], *at[:2])
    run.append(
        "verdicts", [Verdict(HOSTILE, made.task_id, "graded", 0.0, False, {HOSTILE: "failed"})], *at[:2]
    )

    async def play(app: Viewer, press: Callable[..., Awaitable[None]]) -> None:
        app.open(next(row for row in app.rows if row.id == HOSTILE))
        await press()
        shown = "\n".join(text_of(node) for node in app.query("#transcript Static").results(Static))
        assert (
            shown.count("[bold red]no[/]") == 4 and "\u241b[31mred" in shown
        )  # head, message, observation, test
        assert "\\u202egnp.exe" in shown and "\x1b" not in shown

    drive(run, play)


def test_nothing_to_show_is_said(tmp_path: Path):
    run = RunDir.create(tmp_path / "empty", recipe="", manifest={})
    with pytest.raises(RunError, match="no finished rollouts yet"):
        view(run)
    run.append("rollouts", [{"id": "x", "colour": "red"}], "eval", 0)
    with pytest.raises(RunError, match="Rollout has no field 'colour'"):
        view(run)


def test_a_damaged_batch_is_left_out_and_counted(tmp_path: Path):
    run = make_run(tmp_path / "small", Shape())
    run.append("rollouts", [{"id": "x", "colour": "red"}], "eval", 0)  # instead of 8

    async def play(app: Viewer, press: Callable[..., Awaitable[None]]) -> None:
        assert len(app.rows) == Shape().rollouts - 8
        assert text_of(app.query_one("#status", Static)) == "20 of 20 rollouts, 1 batches cannot be read"

    drive(RunDir.open(run.path), play)
