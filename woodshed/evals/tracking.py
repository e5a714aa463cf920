"""Metrics of a run in a tracker: trackio, tensorboard or wandb, behind one setting.

The run folder's metrics.jsonl is always written, and a tracker is sent what was appended to it. The run folder keeps a
count of the lines sent, so a resumed run sends nothing twice, and a tracker that was down catches up. A tracker cannot
stop a run: its errors become one warning.

Each phase has its own axis: "train/reward" over train steps, "eval/solved" over the steps at which it was measured.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from woodshed import documents
from woodshed.records import RecipeError, RunError
from woodshed.runs.files import write_atomically
from woodshed.runs.folder import RunDir

Tracker = Literal["none", "trackio", "tensorboard", "wandb"]
Log = Callable[[str, int, Mapping[str, float]], None]
"""log(phase, step, numbers)."""
STATE = "tracking.json"


@contextmanager
def following(run: RunDir, tracker: Tracker, *, project: str = "woodshed") -> Iterator[None]:
    """While this is open, every metrics line of the run reaches the tracker; lines from before reach it first.

    Raises:
        RecipeError: the tracker is not installed.
    """
    if tracker == "none":
        yield
        return
    mirror = Mirror(run, tracker, project)
    mirror.catch_up()
    run.on_metrics = mirror.catch_up
    try:
        yield
    finally:
        run.on_metrics = None
        mirror.close()


class Mirror:
    """Mirror of a run's metrics in a tracker, which sends each line once."""

    def __init__(self, run: RunDir, tracker: Tracker, project: str) -> None:
        self.run, self.tracker = run, tracker
        self.log, self.end = _open(tracker, run.path, project)
        self.failed = False

    def catch_up(self) -> None:
        lines = self.run.read("metrics")
        num_sent = self._num_sent()
        try:
            for phase, step, metrics in lines[num_sent:]:
                self.log(phase, step, numbers(metrics))
                num_sent += 1
        except Exception as error:  # a tracker's own kinds, network included: it must not stop the run
            self._complain(error)
        self._keep(num_sent)

    def close(self) -> None:
        try:
            self.end()
        except Exception as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self.failed:
            warnings.warn(f"{self.tracker} failed and will be tried again later: {error}", stacklevel=3)
        self.failed = True

    def _num_sent(self) -> int:
        return int(self._state().get(self.tracker, 0))

    def _keep(self, num_sent: int) -> None:
        write_atomically(self.run.path / STATE, json.dumps(self._state() | {self.tracker: num_sent}) + "\n")

    def _state(self) -> dict[str, int]:
        try:
            return dict(documents.read_json(self.run.path / STATE, RunError))
        except (RunError, OSError, ValueError, TypeError):
            return {}


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number of a metrics line under its dotted name; an estimate gives its value under its own."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping) and "value" in value and "low" in value:
            value = value["value"]
        if isinstance(value, Mapping):
            flat |= numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            flat[f"{prefix}{name}"] = float(value)
    return flat


def _open(tracker: Tracker, path: Path, project: str) -> tuple[Log, Callable[[], object]]:
    """Open a tracker: return one function that logs a line and one that ends.

    Raises:
        RecipeError: it is not installed.
    """
    try:
        return {"trackio": _trackio, "tensorboard": _tensorboard, "wandb": _wandb}[tracker](path, project)
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"tracking = {tracker!r} needs {error.name}; install it with pip install 'woodshed[tracking]'"
        ) from None


def _named(phase: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{phase}/{name}": value for name, value in values.items()}


def _trackio(path: Path, project: str) -> tuple[Log, Callable[[], object]]:
    import trackio

    trackio.init(project=project, name=path.name, resume="allow", embed=False, auto_log_gpu=False)

    def log(phase: str, step: int, values: Mapping[str, float]) -> None:
        trackio.log(_named(phase, values), step=step)

    return log, trackio.finish


def _tensorboard(path: Path, project: str) -> tuple[Log, Callable[[], object]]:
    from tensorboard.summary import Writer

    writer = Writer(str(path / "tensorboard"))

    def log(phase: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in _named(phase, values).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(path: Path, project: str) -> tuple[Log, Callable[[], object]]:
    import wandb

    run = wandb.init(project=project, name=path.name, id=_wandb_id(path), resume="allow", dir=str(path))

    def log(phase: str, step: int, values: Mapping[str, float]) -> None:
        run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        run.log({**_named(phase, values), f"{phase}/step": step})

    return log, run.finish


def _wandb_id(path: Path) -> str:
    """Id of a run: equal for every process that resumes it, different for every other run of that name."""
    file = path / "wandb-id"
    if not file.exists():
        import secrets

        write_atomically(file, f"{secrets.token_hex(8)}\n")
    return file.read_text(encoding="utf-8").strip()
