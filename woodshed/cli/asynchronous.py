"""`woodshed child`: the processes of asynchronous RL, which `woodshed train` starts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from woodshed.cli.app import app, keeping
from woodshed.cli.terminal import progress_bars
from woodshed.records import RunError

if TYPE_CHECKING:
    from woodshed.runs.folder import RunDir
    from woodshed.runs.kinds import Writer
    from woodshed.stages.session import Progress

LOCK_S = 20.0
"""Longest wait for the lock of a process that is ending."""


@app.command("child", hidden=True)
def child(
    role: Annotated[Literal["trainer", "collector"], typer.Argument()],
    path: Annotated[Path, typer.Argument(metavar="RUN")],
    server: Annotated[list[str] | None, typer.Option(help="Address of an engine server.")] = None,
) -> None:
    """Do one process's part of a run. `woodshed train` starts it, and it ends with it."""
    from woodshed.runs import processes
    from woodshed.runs.folder import RunDir

    processes.die_with_parent()
    if role == "trainer" and is_another_rank():
        return
    run = RunDir.open(path)
    lock(run, role)
    with keeping("what is finished is kept", run), progress_bars() as progress:
        if role == "trainer":
            train(run, progress)
        else:
            collect(run, server or (), progress)


def is_another_rank() -> bool:
    """Do the part of a rank other than 0, and return True; False for rank 0."""
    from woodshed.cli import train
    from woodshed.learning import launch

    if not launch.is_follower():
        return False
    train.take_part()
    return True


def lock(run: RunDir, role: Writer) -> None:
    """Lock this process's part of the run, once the one before it has ended.

    Raises:
        RunError: as `RunDir.lock`.
    """
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            run.lock(role)
            return
        except RunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def train(run: RunDir, progress: Progress) -> None:
    """The trainer's part."""
    from woodshed import settings
    from woodshed.cli.train import run_recipe
    from woodshed.evals import tracking
    from woodshed.stages.recipe import Recipe

    chosen = settings.read(Recipe, run.path / "recipe.toml")
    with tracking.following(run, chosen.tracking):
        run_recipe(chosen, run, progress)


def collect(run: RunDir, servers: Sequence[str], progress: Progress) -> None:
    """The collector's part.

    Args:
        servers: that the launcher has started, and starts again where they die.
    """
    from woodshed.engines.create import connect, create
    from woodshed.engines.http import EndpointSettings
    from woodshed.engines.servers import START_S
    from woodshed.stages.asynchronous import collector_recipe
    from woodshed.stages.asynchronous.collector import CollectorProcess
    from woodshed.tasks import folder
    from woodshed.tokens import model_files
    from woodshed.tokens.renderer import create_renderer

    recipe = collector_recipe.read(run)
    sets = [run.path / "tasks" / name for name in ("train", "heldout")]
    practice, heldout = (folder.load_set(each) if any(each.iterdir()) else [] for each in sets)
    if not model_files.resolve(recipe.policy.model, weights=False).gguf:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # transformers loads it where it can
    tokenizer, model_dir = model_files.load_tokenizer(recipe.policy.model)
    renderer = create_renderer(tokenizer, codec=recipe.policy.codec, model_dir=model_dir)
    if servers:
        endpoints = [EndpointSettings(url=url, model="policy") for url in servers]
        opened = connect(endpoints, renderer, recipe.engine, START_S)
    else:
        opened = create(recipe.engine, renderer)
    with closing(opened) as engine:
        CollectorProcess(run, recipe, engine, practice, heldout, progress).run()
