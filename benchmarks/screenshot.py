"""A picture of the top of a run's report, such as docs/report.png: the quickstart at seed 0, as a fresh clone made it.

woodshed report runs/quickstart
python benchmarks/screenshot.py runs/quickstart/report.html docs/report.png
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    """Draw the page in the system's Chromium."""
    parser = argparse.ArgumentParser(description="Picture of the top of a report.")
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1160)
    parser.add_argument("--height", type=int, default=800)
    options = parser.parse_args()
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": options.width, "height": options.height})
        page.goto(options.page.resolve().as_uri())
        page.wait_for_timeout(1000)  # curves are drawn by a script
        page.screenshot(path=options.out)
        chromium.close()


if __name__ == "__main__":
    main()
