"""Transcripts worth imitating, as token ids: from the attempts of a run, from ATIF files, and from chat JSONL.

Attempts and ATIF files are taken token by token as they were sampled, which needs the tokenizer that sampled them;
chats are rendered as the harness renders its own. What was said to the policy is context, what it said is imitated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from woodshed import documents
from woodshed.agent.tools import TOOLS
from woodshed.records import Call, Flag, Observation, RecipeError, Rollout, Verdict
from woodshed.runs.folder import RunDir
from woodshed.tokens.conversation import Conversation
from woodshed.tokens.renderer import Renderer
from woodshed.tokens.schema import ToolSpec, foreign_tool

CHAT = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...], "tools": [...]}'


@dataclass(frozen=True)
class Transcript:
    """A conversation as token ids."""

    id: str
    """Its origin: an attempt's id, or the file and line of a chat."""
    ids: tuple[int, ...]
    imitated: tuple[int, ...]
    """Positions in `ids` of the tokens that the policy wrote."""


def read(path: Path, renderer: Renderer, heldout: Set[str] = frozenset()) -> list[Transcript]:
    """Read the transcripts of a run folder, an ATIF file or a folder of them, or a chat JSONL file.

    Attempts are imitated that solved their task, and that no monitor flagged.

    Args:
        heldout: ids of tasks whose attempts are left out, as the policy is measured on them.

    Raises:
        RecipeError: the path is none of these, a file or line cannot be read, or no attempt is left.
        RunError: a run folder that cannot be read.
    """
    if (path / "recipe.toml").is_file():
        transcripts = of_run(path, renderer, heldout)
    elif path.is_dir() and (files := sorted(path.glob("*.json"))):
        transcripts = [each for file in files for each in of_atif(file, renderer, heldout)]
    elif path.suffix == ".json" and path.is_file():
        transcripts = of_atif(path, renderer, heldout)
    elif path.suffix == ".jsonl" and path.is_file():
        transcripts = of_chats(path, renderer)
    else:
        raise RecipeError(
            f"sft.imitate: {path} is no run folder, no ATIF file (.json) or folder of them, and no file of chats "
            '(.jsonl); "scripted" stands for scripted attempts at tasks.train'
        )
    if not transcripts:
        raise RecipeError(
            f"sft.imitate: {path} holds nothing to imitate: no attempt is solved and unflagged, at a task that is not "
            "held out. Take it out, or write the chats to imitate as .jsonl"
        )
    return transcripts


def of_run(path: Path, renderer: Renderer, heldout: Set[str]) -> list[Transcript]:
    """Take the attempts of a run by their verdicts and flags; void ones never."""
    run = RunDir.open(path)
    solved = {verdict.rollout_id: verdict.solved for _, _, verdict in run.read("verdicts", Verdict)}
    flagged = {flag.rollout_id for _, _, flag in run.read("flags", Flag)} if run.has("flags") else set()
    transcripts = []
    for _, _, rollout in run.read("rollouts", Rollout):
        is_good = solved.get(rollout.id, False) and rollout.id not in flagged
        if rollout.ended != "sandbox_lost" and rollout.task_id not in heldout and is_good:
            for segment in rollout.segments:
                turns = [(turn.context_ids, turn.sampled_ids, turn.text) for turn in segment.turns]
                transcripts += _of_turns(rollout.id, f"{path}, attempt {rollout.id}", turns, renderer)
    return transcripts


def of_atif(path: Path, renderer: Renderer, heldout: Set[str]) -> list[Transcript]:
    """Take the trajectory of an ATIF file that `woodshed export` wrote: others keep no context ids."""
    document = _json(documents.read(path, RecipeError, most=documents.MOST_DATA_BYTES), str(path))
    extra = _mapping(document.get("extra"))
    verdict, task_id = _mapping(extra.get("verdict")), str(extra.get("task_id", ""))
    is_void = _mapping(_mapping(document.get("final_metrics")).get("extra")).get("is_void") is True
    is_good = verdict.get("solved") is True and not extra.get("flags")
    if is_void or task_id in heldout or not is_good:
        return []
    segments: dict[int, list[tuple[tuple[int, ...], tuple[int, ...], str]]] = {}
    for number, step in enumerate(_list(document.get("steps")), 1):
        if _mapping(step).get("source") != "agent":
            continue
        extra = _mapping(step.get("extra"))
        context, segment = extra.get("context_token_ids"), extra.get("segment", 0)
        sampled = _mapping(step.get("metrics")).get("completion_token_ids")
        if not (
            _are_ids(context)
            and _are_ids(sampled)
            and isinstance(step.get("message"), str)
            and type(segment) is int
        ):
            raise RecipeError(
                f"{path}, step {number}: no extra.context_token_ids and metrics.completion_token_ids, without which a "
                "trajectory is not exact; write it as chat JSONL to have it rendered"
            )
        segments.setdefault(segment, []).append((tuple(context), tuple(sampled), step["message"]))
    name = str(document.get("trajectory_id", path.stem))
    return [each for turns in segments.values() for each in _of_turns(name, str(path), turns, renderer)]


def of_chats(path: Path, renderer: Renderer) -> list[Transcript]:
    """Render the chats of a JSONL file, one a line, in the form of OpenAI's fine-tuning files."""
    try:
        text = documents.read(path, RecipeError, most=documents.MOST_DATA_BYTES)
    except FileNotFoundError:
        raise RecipeError(f"{path} cannot be read: it is not there") from None
    lines = text.removesuffix("\n").split("\n") if text else []  # JSON may hold what `splitlines` splits at
    return [
        transcript
        for number, line in enumerate(lines, 1)
        for transcript in of_chat(line, f"{path}, line {number}", renderer)
    ]


def of_chat(line: str, origin: str, renderer: Renderer) -> list[Transcript]:
    """Render one chat, a transcript for each of its segments; every token of its assistant's messages is imitated once.

    Raises:
        RecipeError: not such a chat, or a call that cannot be written in the policy's format.
    """
    document = _json(line, origin)
    try:
        tools = [_tool(each) for each in document.get("tools") or ()]
        messages = [(str(each["role"]), each) for each in document["messages"]]
    except (KeyError, TypeError, AttributeError):
        raise RecipeError(f"{origin} is not of the form {CHAT}: {line[:60]!r}") from None
    has_system = bool(messages) and messages[0][0] == "system"
    system = _content(messages[0][1], origin) if has_system else ""
    messages = messages[has_system:]
    roles = [role for role, _ in messages]
    if roles[:2] != ["user", "assistant"] or roles[-1] != "assistant":
        raise RecipeError(
            f"{origin}: after an optional system message a chat begins with user and assistant, and ends with the "
            f"assistant; here roles are {', '.join(roles) or 'none'}"
        )
    conversation = Conversation(renderer, system, _content(messages[0][1], origin), tools)
    segments: dict[int, tuple[list[int], list[int]]] = {}
    rest = messages[1:]
    while rest:
        sampled, calls = _said(rest[0][1], tools, origin, renderer)
        ids, imitated = segments.setdefault(conversation.segment, ([], []))
        ids += conversation.context.ids
        imitated += range(len(ids), len(ids) + len(sampled))
        ids += sampled
        answers = list(_until_assistant(rest[1:]))
        if rest := rest[1 + len(answers) :]:
            conversation.add(sampled, "stop", _heard(answers, calls, origin), calls)
    return [Transcript(origin, tuple(ids), tuple(imitated)) for ids, imitated in segments.values()]


def _said(
    message: Mapping[str, Any], tools: Sequence[ToolSpec], origin: str, renderer: Renderer
) -> tuple[tuple[int, ...], list[Call]]:
    """Token ids and calls of an assistant's message, its calls written in the policy's format."""
    parts, calls = [_content(message, origin)], []
    for number, each in enumerate(message.get("tool_calls") or ()):
        try:
            name, arguments = each["function"]["name"], each["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            raw = renderer.codec.format(name, arguments, tools)
        except (KeyError, TypeError, ValueError) as error:
            raise RecipeError(
                f"{origin}: a call cannot be written in the policy's format ({error}): {str(each)[:80]}"
            ) from None
        calls.append(Call(str(each.get("id", f"call_{number}")), name, arguments, raw))
        parts.append(raw)
    text = "\n".join(part for part in parts if part)
    if not text:
        raise RecipeError(f"{origin}: a message of the assistant is empty")
    return renderer.encode_message(text), calls


def _heard(
    answers: Sequence[tuple[str, Mapping[str, Any]]], calls: Sequence[Call], origin: str
) -> list[Observation]:
    """Results of all calls, or one message of the user where there were none."""
    roles = [role for role, _ in answers]
    expected = ["tool"] * len(calls) if calls else ["user"]
    if roles != expected:
        raise RecipeError(
            f"{origin}: after an assistant's message with {len(calls)} calls stand {', '.join(roles) or 'none'}, where "
            f"{', '.join(expected)} is expected"
        )
    names = [call.id for call in calls] or [""]
    return [
        Observation(name, _content(message, origin))
        for name, (_, message) in zip(names, answers, strict=True)
    ]


def _until_assistant(
    messages: Iterable[tuple[str, Mapping[str, Any]]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for role, message in messages:
        if role == "assistant":
            return
        yield role, message


def _tool(each: Mapping[str, Any]) -> ToolSpec:
    """A tool of a chat; the harness's own where it is the same, with its place in the plain format."""
    function = each.get("function", each)
    name, parameters = function["name"], dict(function.get("parameters") or {"type": "object"})
    own = next((tool for tool in TOOLS if tool.name == name and tool.parameters == parameters), None)
    return own or foreign_tool(name, str(function.get("description", "")), parameters)


def _content(message: Mapping[str, Any], origin: str) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, str):
        raise RecipeError(f"{origin}: content must be text, and is {str(content)[:60]!r}")
    return content


def _of_turns(
    name: str, origin: str, turns: Sequence[tuple[tuple[int, ...], tuple[int, ...], str]], renderer: Renderer
) -> list[Transcript]:
    """The transcript of (context ids, sampled ids, text) of every turn; nothing where no token was sampled."""
    ids: list[int] = []
    imitated: list[int] = []
    for context, sampled, text in turns:
        if _decoded(renderer, sampled) != text:
            raise RecipeError(
                f"{origin} was sampled with another tokenizer than the policy's: its tokens read "
                f"{_decoded(renderer, sampled)[:40]!r} here, and were {text[:40]!r}. Imitate attempts of the same model"
            )
        ids += context
        imitated += range(len(ids), len(ids) + len(sampled))
        ids += sampled
    return [Transcript(name, tuple(ids), tuple(imitated))] if imitated else []


def _decoded(renderer: Renderer, ids: Sequence[int]) -> str:
    try:
        return renderer.decode(ids)
    except (IndexError, OverflowError, TypeError, ValueError):  # ids that the tokenizer does not have
        return ""


def _json(text: str, origin: str) -> dict[str, Any]:
    document = documents.parse_json(text, origin, RecipeError)
    if not isinstance(document, dict):
        raise RecipeError(f"{origin} cannot be read: not an object")
    return document


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int for item in value)
