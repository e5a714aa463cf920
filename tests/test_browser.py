"""The page of a run in a real browser: Chromium of the system, without a window, driven by keys as a person would.

Screenshots go to the folder that WOODSHED_SCREENSHOTS names, else to the test's temporary folder. Without a browser
the tests are skipped, except where CI is set.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lifelike import Shape, make_run
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from woodshed import report
from woodshed.records import Flag, Hint, Rollout, Verdict
from woodshed.runs.folder import RunDir

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ATTACK = (
    "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=2'><iframe srcdoc='x'></iframe>"
    "<a href='javascript:window.pwned=3'>x</a>{{ 7*7 }}\x1b[31mred\u202egnp.exe"
)
SHADED = (
    "[...document.querySelectorAll('.turn.current .token')].filter(t => t.style.background !== '').length"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        reason = "no Chromium on this machine: install the package `chromium`"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with sync_playwright() as play:
        # Root in a container has no user namespaces for Chromium's own sandbox; the page is ours.
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    made = make_run(tmp_path_factory.mktemp("runs") / "small", Shape())
    report.write(made)
    return made


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("WOODSHED_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Tab:
    """A page, ready. What it asks the network for, complains about or throws fails the test when it is closed."""

    def __init__(
        self, browser: Browser, path: Path, *, width: int = 1280, height: int = 900, is_dark: bool = False
    ):
        self.troubles: list[str] = []
        scheme = "dark" if is_dark else "light"
        self.page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page.set_default_timeout(240_000)  # machines that have other work to do
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("dialog", lambda dialog: self.troubles.append(f"dialog {dialog.message}"))
        self.page.on("request", self._asked)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached")

    def _heard(self, said: ConsoleMessage) -> None:
        if said.type == "error":
            self.troubles.append(said.text)

    def _asked(self, request: Request) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.troubles.append(request.url)

    def close(self) -> None:
        assert self.troubles == []
        self.page.close()


def search(page: Page, query: str) -> int:
    page.keyboard.press("/")
    page.keyboard.type(query)
    return int(page.inner_text("#count").split()[0].replace(",", ""))


def test_filter_step_to_a_hint_see_the_colours_and_the_night(
    browser: Browser, run: RunDir, screenshots: Path
):
    tab = Tab(browser, run.path / "report.html")
    page = tab.page
    hinted = {(hint.rollout_id, hint.turn) for phase, _, hint in run.read("hints", Hint) if phase == "train"}
    assert search(page, "has:hint phase:train") == len({rollout for rollout, _ in hinted})
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.current .hint")
    assert page.inner_text(".turn.current .hint").startswith(("bad_", "old_"))
    turns = [t for r, t in hinted if r == page.inner_text("#transcript header h3")]
    assert page.inner_text(".turn.current .head b").strip() == f"turn {min(turns)}"

    assert page.locator(".turn.beside aside").count() > 0
    alone = page.locator(".turn:not(.beside) .body >> nth=0")
    if alone.count():
        assert alone.bounding_box()["width"] > 600, "a turn without a hint has the whole width"  # type: ignore[index]

    page.keyboard.press("t")
    page.wait_for_selector(".turn.current .lesson")
    assert "hint gain" in page.inner_text(".turn.current .lesson")
    shaded = {}
    for mode in ("log-prob", "hint", "divergence", "none"):
        assert page.is_checked(f"input[value='{mode}']")
        shaded[mode] = page.evaluate(SHADED)
        page.keyboard.press("c")
    assert shaded["none"] == 0 < min(shaded["log-prob"], shaded["hint"], shaded["divergence"])

    page.click("input[value='hint']")
    page.hover(".turn.current .token >> nth=0")
    assert re.search(r"student .*%, after the hint .*%, divergence", page.inner_text("#token"))
    page.screenshot(path=screenshots / "transcript-light.png")
    day = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("d")
    night = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert day == "rgb(255, 255, 255)" and night == "rgb(20, 23, 28)"
    page.screenshot(path=screenshots / "transcript-dark.png")
    tab.close()


def test_keys_walk_through_turns_rollouts_and_faults(browser: Browser, run: RunDir):
    tab = Tab(browser, run.path / "report.html")
    page = tab.page
    rollouts = [rollout for _, _, rollout in run.read("rollouts", Rollout)]

    def at() -> tuple[str, str]:
        page.wait_for_selector(".turn.current")
        return page.inner_text("#transcript header h3"), page.inner_text(".turn.current .head b").strip()

    page.keyboard.press("n")
    assert at() == (rollouts[0].id, "turn 0")
    for key, expected in (("j", "turn 1"), ("j", "turn 2"), ("k", "turn 1")):
        page.keyboard.press(key)
        assert at() == (rollouts[0].id, expected)
    faults = [(r.id, n) for r in rollouts for n, turn in enumerate(r.turns) if turn.error_kind]
    ahead = [fault for fault in faults if fault[0] != rollouts[0].id or fault[1] > 1]
    for rollout, turn in ahead[:4]:
        page.keyboard.press("f")
        page.wait_for_function(
            "id => document.querySelector('#transcript h3').textContent === id", arg=rollout
        )
        assert at() == (rollout, f"turn {turn}")
    assert page.evaluate("location.hash").startswith("#r/0/")
    page.keyboard.press("?")
    assert page.is_visible("dialog")
    tab.close()


def test_search_finds_the_words_of_transcripts(browser: Browser, run: RunDir):
    tab = Tab(browser, run.path / "report.html")
    page = tab.page
    rollouts = [rollout for _, _, rollout in run.read("rollouts", Rollout)]
    texts = [
        "\n".join(
            [
                r.task_name,
                r.patch.diff,
                *(t.text for t in r.turns),
                *(o.text for t in r.turns for o in t.observations),
            ]
        )
        for r in rollouts
    ]
    for word in ("import", "return", "module_3", "zebra"):
        hinted_text = sum(word in text.lower() for text in texts)
        assert search(page, word) == hinted_text, word
        page.keyboard.press("Escape")
    search(page, "import")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.current")
    marked = "[...CSS.highlights.get('found')].map(range => range.toString().toLowerCase())"
    found = page.evaluate(marked)
    assert found and set(found) == {"import"}, "what was searched is marked"
    assert "import" in page.inner_text(".turn.current").lower(), "and in view"

    won = [v for _, _, v in run.read("verdicts", Verdict) if v.reward > 0.5]
    assert search(page, "reward:>0.5") == len(won)
    page.keyboard.press("Escape")
    assert search(page, "reward:<=0.5") == len(rollouts) - len(won)
    page.keyboard.press("Escape")
    page.fill("#query", "")
    page.press("#query", "Escape")
    page.select_option("#order", "-reward")
    first = page.inner_text("#list .row >> nth=0")
    page.select_option("#order", "reward")
    assert first.startswith("\u2713") and page.inner_text("#list .row >> nth=0").startswith("\u2717")
    assert search(page, "is:bogus") == 0 and "is: takes solved, partly" in page.inner_text("#count")
    page.keyboard.press("Escape")
    assert search(page, "colour:red") == 0
    assert "colour: is no filter, so colour:red is searched as text" in page.inner_text("#count")
    tab.close()


def test_hostile_text_does_nothing(browser: Browser, tmp_path: Path):
    run = make_run(tmp_path / "hostile", Shape(tasks=1, steps=2, tasks_per_step=1, attempts=1, turns=1))
    [made] = run.find("rollouts", Rollout, "train", 0) or []
    seen = dataclasses.replace(made.turns[0].observations[0], text=ATTACK)
    turn = dataclasses.replace(made.turns[0], text=ATTACK, observations=(seen,), error_kind=None)
    patch = dataclasses.replace(made.patch, diff=ATTACK, skipped={ATTACK: ATTACK})
    made = dataclasses.replace(made, id=ATTACK, task_name=ATTACK, turns=(turn,), patch=patch)
    run.append("rollouts", [made], "train", 0)
    run.append(
        "verdicts",
        [Verdict(ATTACK, made.task_id, "graded", 0.0, False, {ATTACK: "failed"}, (ATTACK,), ATTACK)],
        "train",
        0,
    )
    run.append("hints", [Hint(ATTACK, 0, ATTACK, ATTACK)], "train", 0)
    run.append("flags", [Flag(ATTACK, ATTACK, 0, ATTACK, 0.5)], "train", 0)
    for step in range(2):
        metrics = {"reward": 0.1 * step, "faults": {ATTACK: 0.5 * step}, ATTACK: 1.0}
        run.append("metrics", [metrics], "train", step)
    tab = Tab(browser, report.write(run))
    page = tab.page
    assert search(page, "is:flagged step:0 phase:train") == 1
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.current")
    shown = page.inner_text("#transcript")
    assert shown.count("</script><script>window.pwned=1</script>") >= 6 and "\\u202egnp.exe" in shown
    assert "\u241b[31mred" in shown and "\x1b" not in shown and "{{ 7*7 }}" in shown
    page.evaluate("document.getElementById('curves').scrollIntoView()")
    page.wait_for_selector(".chart.drawn")
    foreign = ":is(#transcript, #list, .chart) :is(script, iframe, a), :is(#transcript, #list) img"
    assert page.locator(foreign).count() == 0
    assert page.evaluate("window.pwned") is None
    tab.close()


def test_arms_and_seeds_stand_side_by_side(browser: Browser, tmp_path: Path, screenshots: Path):
    runs = [
        make_run(
            tmp_path / f"weight-{weight}-seed-{seed}",
            Shape(),
            seed=seed,
            settings=f"[feedback]\nweight = {weight}",
        )
        for weight in (1.0, 0.0)
        for seed in (0, 1)
    ]
    tab = Tab(browser, report.write(*runs))
    page = tab.page
    assert page.locator("h2", has_text="feedback.weight = 0.0").count() == 1
    assert page.locator("th", has_text="against feedback.weight = 1.0").count() == 1
    page.evaluate("document.getElementById('curves').scrollIntoView()")
    page.wait_for_selector(".chart.drawn .legend")
    assert "feedback.weight = 0.0" in page.inner_text(".chart.drawn >> nth=0")
    page.wait_for_timeout(500)
    page.screenshot(path=screenshots / "variants.png")
    assert search(page, "run:weight-1.0-seed-1") == Shape().rollouts
    tab.close()


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, run: RunDir, screenshots: Path):
    tab = Tab(browser, run.path / "report.html", width=390, height=844, is_dark=True)
    page = tab.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    search(page, "has:hint")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.current .hint")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.screenshot(path=screenshots / "phone-dark.png")
    tab.close()
