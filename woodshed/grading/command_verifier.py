"""The verifier of tasks that bring a command: `tests/test.sh` of a Harbor folder, and the reward that it leaves.

The command runs in a fresh sandbox that shows the task's tests/ at /tests, over the files of the patch that may cross.
Code under test runs in the same sandbox as the command, so a reward is believed as far as the command defends it.
Of Harbor's [verifier], `timeout_sec` and `env` are honoured, and the rest is refused by name (`tasks.folder.reading`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from woodshed.grading.patches import crossing, lay, left_behind
from woodshed.records import Patch, SandboxError, Task, Verdict
from woodshed.sandbox import Result, Sandbox, SandboxProvider, store
from woodshed.tasks import environment, grading_files

COMMAND = "bash /tests/test.sh"
LOGS = "/logs"
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""Files in which a command leaves its reward, as in Harbor: the first that is there counts."""


@dataclass(frozen=True)
class CommandVerifier:
    """See `verifier.Verifier`. Without a reward file, exit code 0 of the command is a reward of 1."""

    command: str = COMMAND
    timeout_s: float | None = None
    """Seconds for the command; None takes the task's own."""

    def grade(self, task: Task, patch: Patch, sandboxes: SandboxProvider) -> Verdict:
        """The verdict: "invalid" where the sandbox was lost, or the reward file holds no finite number.

        Raises:
            TaskError: the task's environment cannot be built.
        """
        began = time.monotonic()
        crossed, left = crossing(task, patch)
        reward: float | None = None
        try:
            result, reward = self._run(task, crossed, sandboxes)
            said = (result.stdout + result.stderr).decode(errors="replace")[-4000:]
        except (SandboxError, ValueError) as error:
            said = str(error)
        value = 0.0 if reward is None else min(1.0, max(0.0, reward))
        return Verdict(
            rollout_id="",
            task_id=task.id,
            status="invalid" if reward is None else "graded",
            reward=value,
            solved=value == 1.0,
            outcomes={},
            integrity=(),
            detail="\n".join([*left_behind(left), said]),
            seconds=time.monotonic() - began,
        )

    def _run(
        self, task: Task, crossed: Mapping[str, bytes | None], sandboxes: SandboxProvider
    ) -> tuple[Result, float]:
        """Raises ValueError where the reward file holds no finite number."""
        with store.folder() as scratch:
            layer = scratch / "patch"
            deleted = lay(layer, crossed)
            spec = environment.sandbox_spec(task, extra_lowers=(layer,))
            spec = replace(spec, binds={"/tests": grading_files(task)}, scratch=(LOGS,), user="grader")
            with sandboxes.open(spec) as sandbox:
                if deleted:
                    sandbox.exec(["rm", "-f", "--", *deleted])
                sandbox.exec(["mkdir", "-p", f"{LOGS}/verifier"])
                limit_s = self.timeout_s or task.verify_timeout_s
                result = sandbox.exec(self.command, env=task.verifier_env, timeout_s=limit_s)
                if result.outcome == "sandbox_lost":
                    raise SandboxError("the sandbox was lost while the task's command ran")
                if result.outcome not in ("ok", "nonzero"):  # ended by its limits, whatever it wrote before
                    return result, 0.0
                written = _reward(sandbox)
        return result, float(result.outcome == "ok") if written is None else written


def _reward(sandbox: Sandbox) -> float | None:
    """The reward that a command left; None where it left no file.

    Raises:
        ValueError: a file that holds no finite number.
    """
    for path in REWARDS:
        try:
            text = sandbox.read(path).decode("utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        try:
            value = json.loads(text)
            reward = float(value["reward"] if isinstance(value, dict) else value)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            reward = math.nan
        if not math.isfinite(reward):
            raise ValueError(
                f"{path} holds {text[:80]!r}; expected a finite number, or an object with a reward"
            )
        return reward
    return None
