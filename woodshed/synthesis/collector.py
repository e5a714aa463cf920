"""Collects a suite inside a sandbox and runs nothing. Standard library and pytest; one file.

The answer is a JSON file: {"ids": [ids in their order, without those deselected], "errors": {file: end of its error}}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path[:0] = ["/run/woodshed"]

import pytest  # noqa: E402

try:
    import woodshed_runner as runner  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:  # read on the host, not run in a sandbox
    from woodshed.grading import runner


class SuiteCollector(runner.Recorder):  # pyright: ignore[reportGeneralTypeIssues]
    """The runner's plugin, which stops where the tests would begin."""

    def __init__(self, request: dict, channel: int) -> None:
        super().__init__(channel, "", None, [], request["workspace"])
        self.ids: list[str] = []
        self.errors: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors[report.nodeid] = str(report.longrepr)[-2000:]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.ids = list(dict.fromkeys(item.nodeid for item in session.items))
        return True


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(request["workspace"])
    with Path(os.devnull).open("wb") as nothing:
        collector = SuiteCollector(request, nothing.fileno())
        pytest.main(runner.arguments(request), plugins=[collector])
    answer = {"ids": collector.ids, "errors": collector.errors}
    Path(request["out"]).write_text(json.dumps(answer), "utf-8")
    os._exit(0)


if __name__ == "__main__":
    main()
