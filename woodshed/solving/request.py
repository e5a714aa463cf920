"""One request: an attempt by the same loop as in training, on a copy of the working tree in a sandbox."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from woodshed.agent.attempt import Attempt
from woodshed.agent.deployment import DeploymentSettings
from woodshed.engines.engine import Engine, sample_all
from woodshed.records import RecipeError, Rollout, Task, Turn
from woodshed.sandbox import Sandbox, SandboxProvider, SandboxSpec
from woodshed.solving.keeping import as_task
from woodshed.solving.working_tree import WorkingTree, difference, own_environment, usable
from woodshed.tasks import workspace


@dataclass(frozen=True)
class Request:
    """A request with the copy of the working tree on which the policy works."""

    task: Task
    """The request as a task without tests."""
    tree: WorkingTree
    spec: SandboxSpec
    sandboxes: SandboxProvider

    @property
    def copy(self) -> Path:
        """Folder of the files as the policy is given them."""
        return workspace(self.task)

    def attempt(
        self,
        engine: Engine,
        settings: DeploymentSettings,
        rollout_id: str,
        *,
        number: int = 0,
        on_turn: Callable[[Turn], None] = lambda turn: None,
    ) -> Rollout:
        """Work until the policy says that it has finished, or a budget is used up.

        Args:
            number: attempts at this request so far; each has a seed of its own.
            on_turn: is told every turn as it ends.

        Raises:
            SandboxError: no sandbox can be opened.
            SamplerError: as the engine.
            RecipeError: the request does not fit the context.
        """
        trial = Attempt(
            self.task,
            self._open(),
            engine.renderer,
            settings.agent,
            rollout_id=rollout_id,
            context_length=engine.context_length,
            attempt=number,
            seed=settings.seed,
        )
        trial.reopen, trial.is_strict = self._open, False
        try:
            while not trial.done:
                trial.act(sample_all(engine, [trial.request()])[0])
                on_turn(trial.turns[-1])
            rollout = trial.finish()
        finally:
            trial.sandbox.close()
        patch = usable(rollout.patch)
        return replace(rollout, patch=replace(patch, diff=difference(patch.files, self.copy)))

    def check(self) -> None:
        """Open a sandbox and close it, before anything is loaded.

        Raises:
            SandboxError: none can be opened; says what to do.
        """
        self._open().close()

    def _open(self) -> Sandbox:
        return self.sandboxes.open(self.spec)


@contextmanager
def open_request(
    tree: WorkingTree, text: str, environment: Path | None, sandboxes: SandboxProvider
) -> Iterator[Request]:
    """A request at a repository, whose copy is deleted in the end.

    Args:
        environment: virtual environment that commands see; None for the repository's own, if it has one.

    Raises:
        RecipeError: an empty request.
    """
    if not text.strip():
        raise RecipeError("the request is empty; say in words what is to be done")
    with tempfile.TemporaryDirectory(prefix="woodshed-solve-") as scratch:
        task = _task(tree, text, Path(scratch, "task"))
        tree.copy(workspace(task))
        spec = SandboxSpec(
            lowers=(workspace(task),),
            environment=environment or own_environment(tree),
            env={
                "PYTHONPATH": ":".join(
                    f"/workspace/{root}".rstrip("/.") for root in task.environment.source_roots
                )
            },
        )
        yield Request(task, tree, spec, sandboxes)


def _task(tree: WorkingTree, text: str, folder: Path) -> Task:
    """The request as a task: the policy is told the text alone, and nothing grades it."""
    digest = hashlib.sha256(f"{tree.root}\0{tree.commit}\0{text}".encode(errors="replace")).hexdigest()[:16]
    roots = (".", "src") if (tree.root / "src").is_dir() else (".",)
    task = as_task(digest, text, folder, roots)
    provenance = {"repository": str(tree.root), "commit": tree.commit}
    return replace(task, name=f"{tree.root.name or 'repository'}-{digest[:8]}", provenance=provenance)
