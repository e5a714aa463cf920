"""Export of trajectories as ATIF v1.8, the interchange format of Harbor, one JSON file per rollout.

ATIF knows messages, calls, observations and token ids. What the format lacks (calls that cannot be read, hints,
flags, verdicts, policy versions) is under `extra`, where the format allows anything. The prompt of turn t is the
`context_token_ids` and `completion_token_ids` of all turns of its segment before it, and its own `context_token_ids`:
written out in every step, the ids of a long rollout would grow with the square of its length.

`scripts/validate-atif FILE...` runs Harbor's own validator.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from woodshed import __version__
from woodshed.agent.prompt import system_prompt, user_prompt
from woodshed.evals import evaluation, ledger
from woodshed.evals.behaviour import prompt_lengths
from woodshed.evals.measures import Graded, pair
from woodshed.records import Call, Flag, Hint, Observation, Rollout, RunError, Task, TaskError, Turn, Verdict
from woodshed.runs.files import write_atomically
from woodshed.runs.folder import RunDir
from woodshed.tasks import folder

SCHEMA = "ATIF-v1.8"
NOTES = (
    "Token-exact: the prompt of a step is extra.context_token_ids and metrics.completion_token_ids of all agent steps "
    "of the same extra.segment before it, then its own extra.context_token_ids; extra.begins says why. Calls "
    "that could not be read are in extra.unreadable_calls."
)


def export(run: RunDir, out: Path, *, problems: list[str]) -> int:
    """Write every rollout of a run below `out` as PHASE-STEP-TASK-ATTEMPT.json; the number of files.

    What cannot be read is left out, with a sentence in `problems`.

    Raises:
        RunError: `out` cannot be written, or nothing could be read.
    """
    rollouts = run.read("rollouts", Rollout, problems=problems)
    verdicts = [verdict for _, _, verdict in run.read("verdicts", Verdict, problems=problems)]
    hints: dict[str, list[Hint]] = {}
    for _, _, hint in run.read("hints", Hint, problems=problems):
        hints.setdefault(hint.rollout_id, []).append(hint)
    graded = pair([r for _, _, r in rollouts], verdicts, flags=evaluation.flags(run, problems=problems))
    recipe, tasks, run_ledger, used_names = run.recipe(), _tasks(run, problems), ledger.from_run(run), set()
    if not rollouts:
        raise RunError(
            f"{run.path} holds no rollout that can be read; {'; '.join(problems) or 'none was finished'}"
        )
    try:
        for (phase, step, _), attempt in zip(rollouts, graded, strict=True):
            bill = run_ledger.bill(ledger.of_rollout(attempt.rollout))
            document = trajectory(
                attempt,
                hints=hints.get(attempt.rollout.id, ()),
                task=tasks.get(attempt.rollout.task_id),
                session=run.path.name,
                agent=agent(recipe, run.manifest),
                position={"phase": phase, "step": step},
                cost=None if bill.unknown or run_ledger.prices.currency != "USD" else bill.total,
            )
            write_atomically(out / _file_name(attempt.rollout.id, used_names), json.dumps(document) + "\n")
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror or error}") from error
    return len(rollouts)


def agent(recipe: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Agent of the trajectories: harness, version, model, and the tools as the manifest spells them, the user's own
    included: nothing is imported from where a recipe says."""
    policy = recipe.get("policy", recipe)
    settings = recipe.get("agent", {})
    return {
        "name": "woodshed",
        "version": str(manifest.get("woodshed") or __version__),
        "model_name": str(policy.get("model") or "unknown"),
        "tool_definitions": _definitions(manifest.get("tools", ())),
        "extra": {"settings": settings, "adapter": str(policy.get("adapter", ""))},
    }


def trajectory(
    graded: Graded,
    *,
    hints: Iterable[Hint],
    task: Task | None,
    session: str,
    agent: dict[str, Any],
    position: dict[str, Any],
    cost: float | None,
) -> dict[str, Any]:
    """One rollout as an ATIF document, all text made valid UTF-8."""
    rollout = graded.rollout
    by_turn: dict[int, list[Hint]] = {}
    for hint in hints:
        by_turn.setdefault(hint.turn, []).append(hint)
    if rollout.tools is not None:
        agent = agent | {"tool_definitions": _definitions(rollout.tools)}
    opening = _opening(rollout, task, agent["extra"]["settings"])
    flags = graded.flags or ()
    turns = [
        _step(turn, n, prompt, by_turn.get(n, ()), [flag for flag in flags if flag.turn == n])
        for n, (turn, prompt) in enumerate(zip(rollout.turns, prompt_lengths(rollout), strict=True))
    ]
    document = {
        "schema_version": SCHEMA,
        "session_id": session,
        "trajectory_id": rollout.id,
        "agent": agent,
        "steps": [{"step_id": n, **step} for n, step in enumerate([*opening, *turns], 1)],
        "notes": NOTES,
        "final_metrics": _final(graded, len(turns) + len(opening), cost),
        "extra": position | _outcome(graded),
    }
    return _valid(document)


def _opening(rollout: Rollout, task: Task | None, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first messages, as far as they are known: an agent of others has a system prompt of its own."""
    told = user_prompt(task) if task else f"[{rollout.task_name}: the task was not kept]"
    user = {"source": "user", "message": told}
    if rollout.tools is not None:
        return [user]
    rules = system_prompt(max_calls=settings.get("max_calls", 1))
    if path := settings.get("system_prompt"):
        rules = f"[the text of {path}]"
    return [{"source": "system", "message": rules}, user]


def _definitions(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in the form of function calling."""
    keys = ("name", "description", "parameters")
    return [{"type": "function", "function": {key: tool[key] for key in keys}} for tool in tools]


def _outcome(graded: Graded) -> dict[str, Any]:
    """Identity and result of an attempt."""
    rollout = graded.rollout
    return {
        "task_id": rollout.task_id,
        "task_name": rollout.task_name,
        "attempt": rollout.attempt,
        "seed": rollout.seed,
        "ended": rollout.ended,
        "seconds": rollout.seconds,
        "patch": rollout.patch.diff,
        "flags": None if graded.flags is None else [_flag(flag) for flag in graded.flags],
        "verdict": None if graded.verdict is None else _verdict(graded.verdict),
    }


def _step(
    turn: Turn, number: int, prompt: int, hints: Sequence[Hint], flags: Sequence[Flag]
) -> dict[str, Any]:
    readable = {call.id: f"{number}-{call.id}" for call in turn.calls if _is_readable(call)}
    extra: dict[str, Any] = {
        "context_token_ids": list(turn.context_ids),
        "opening": turn.opening,
        "segment": turn.segment,
        "begins": turn.begins,
        "versions": [list(span) for span in turn.versions],
        "finish_reason": turn.finish_reason,
        "error_kind": turn.error_kind,
        "seconds": {"sampling": turn.sample_s, "tools": turn.tools_s},
    }
    if unreadable := [call for call in turn.calls if not _is_readable(call)]:
        extra["unreadable_calls"] = [
            {"id": call.id, "raw": call.raw, "tool": call.tool, "error_kind": call.error_kind}
            for call in unreadable
        ]
    if hints:
        extra["hints"] = [{"detector": hint.detector, "text": hint.text} for hint in hints]
    if flags:
        extra["flags"] = [_flag(flag) for flag in flags]
    step: dict[str, Any] = {
        "source": "agent",
        "message": turn.text,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": prompt,
            "cached_tokens": prompt - len(turn.context_ids),
            "completion_tokens": len(turn.sampled_ids),
            "completion_token_ids": list(turn.sampled_ids),
            "logprobs": list(turn.logps),
        },
        "extra": extra,
    }
    if readable:
        step["tool_calls"] = [_call(call, readable[call.id]) for call in turn.calls if call.id in readable]
    if turn.observations:
        step["observation"] = {
            "results": [_observation(observation, readable) for observation in turn.observations]
        }
    return step


def _is_readable(call: Call) -> bool:
    return bool(call.tool) and call.error_kind != "unparseable"


def _call(call: Call, name: str) -> dict[str, Any]:
    extra = {"raw": call.raw} | ({"error_kind": call.error_kind} if call.error_kind else {})
    return {
        "tool_call_id": name,
        "function_name": call.tool,
        "arguments": dict(call.arguments),
        "extra": extra,
    }


def _observation(observation: Observation, readable: Mapping[str, str]) -> dict[str, Any]:
    extra = {
        "call_id": observation.call_id,
        "error_kind": observation.error_kind,
        "seconds": observation.seconds,
    }
    source = {"source_call_id": readable[observation.call_id]} if observation.call_id in readable else {}
    return {**source, "content": observation.text, "extra": extra}


def _final(graded: Graded, num_steps: int, cost: float | None) -> dict[str, Any]:
    used = ledger.of_rollout(graded.rollout)
    return {
        "total_prompt_tokens": used.prefill_tokens + used.cached_tokens,
        "total_cached_tokens": used.cached_tokens,
        "total_completion_tokens": used.decode_tokens,
        "total_steps": num_steps,
        **({} if cost is None else {"total_cost_usd": cost}),
        "extra": {
            "reward": None if graded.verdict is None else graded.verdict.reward,
            "solved": None if graded.verdict is None else graded.verdict.solved,
            "is_void": graded.is_void,
        },
    }


def _flag(flag: Flag) -> dict[str, Any]:
    return {"rule": flag.rule, "turn": flag.turn, "quote": flag.quote, "confidence": flag.confidence}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "status": verdict.status,
        "reward": verdict.reward,
        "solved": verdict.solved,
        "outcomes": dict(verdict.outcomes),
        "integrity": list(verdict.integrity),
        "seconds": verdict.seconds,
    }


def _valid(value: Any) -> Any:
    """The same value with lone surrogates spelt out: JSON could carry them, strict readers reject them."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_valid(key): _valid(item) for key, item in value.items()}
    return [_valid(item) for item in value] if isinstance(value, list | tuple) else value


def _file_name(rollout_id: str, used: set[str]) -> str:
    """A plain file name made from any id."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", rollout_id).lstrip(".")
    if name != rollout_id or len(name) > 200 or name in used:
        digest = hashlib.sha256(rollout_id.encode(errors="surrogatepass")).hexdigest()[:8]
        name = f"{name[:200]}-{digest}"
    used.add(name)
    return f"{name}.json"


def _tasks(run: RunDir, problems: list[str]) -> dict[str, Task]:
    """The run's own tasks by id."""
    tasks = {}
    for path in sorted((run.path / "tasks").glob("*/*/task.toml")):
        try:
            task = folder.load(path.parent)
        except TaskError as error:
            problems.append(str(error))
        else:
            tasks[task.id] = task
    return tasks
