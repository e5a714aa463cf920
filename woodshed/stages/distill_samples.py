"""Learning from demonstrations by one's own words: SDFT and OPSD as a phase before RL, with forgetting measured.

The policy answers without the demonstration; the teacher, the same model that was shown it, scores the same tokens; the
divergence between the two is the loss (SDFT, arXiv 2601.19897). With attempts at practice tasks the demonstration is
the task's solution (OPSD, arXiv 2601.18734). Nothing is imitated token by token: what the policy would never say is
never trained on, which is why it forgets less than fine-tuning, and why forgetting is measured and not assumed.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import Field, model_validator

from woodshed.agent.attempt import turn_seed
from woodshed.engines.engine import Engine, SampleRequest, sample_all
from woodshed.feedback import demonstrations
from woodshed.learning import packing
from woodshed.learning.loss_settings import FeedbackSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.packing import Batch, Row
from woodshed.learning.policy import Policy
from woodshed.records import Hint, Patch, RecipeError, Rollout, Task, Turn
from woodshed.runs.folder import RunDir
from woodshed.settings import Settings
from woodshed.tokens.renderer import Renderer

T = TypeVar("T")

SEEN = 32  # demonstrations on which likelihoods are measured, spread evenly


class DistillSettings(Settings):
    """A phase of learning from demonstrations, after the warm-up and before RL; off by default."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 skips the phase."""
    demonstrations: tuple[Path, ...] = ()
    """JSONL files with {"prompt": ..., "demonstration": ...} a line: examples of answers, or documentation."""
    earlier: tuple[Path, ...] = ()
    """JSONL files of the same form that are not studied: what must not be forgotten is measured on them."""
    answers_per_step: int = Field(default=16, ge=0)
    """Prompts of `demonstrations` that are answered in one step."""
    tasks_per_step: int = Field(default=0, ge=0)
    """Practice tasks attempted in one step, once each; their demonstration is the solution."""
    answer_tokens: int = Field(default=256, ge=1)
    """Longest answer."""
    system: str = "You are a helpful assistant."
    """System prompt of the answers."""
    every: int = Field(default=10, ge=1)
    """Steps between checkpoints, and between measurements of what was learnt and forgotten."""
    feedback: FeedbackSettings = FeedbackSettings(preset="sdft", scope="rollout")
    """Teacher and divergence: preset sdft or opsd, or anything else that targeted feedback offers."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Learning rate and what surrounds it."""

    @model_validator(mode="before")
    @classmethod
    def _about_whole_answers(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("feedback"), dict):
            return given
        return {**given, "feedback": {"preset": "sdft", "scope": "rollout", **given["feedback"]}}

    @model_validator(mode="after")
    def _has_something_to_study(self) -> DistillSettings:
        answers, attempts = self.demonstrations and self.answers_per_step, self.tasks_per_step
        if self.steps and not (answers or attempts):
            raise ValueError("distill.steps needs distill.demonstrations, or distill.tasks_per_step above 0")
        if self.steps and self.feedback.scope != "rollout":
            raise ValueError(
                'distill.feedback.scope must be "rollout": a demonstration is about a whole answer'
            )
        return self


@dataclass(frozen=True)
class Demonstration:
    """A question with an example of a good answer, or with what one should know to answer."""

    prompt: str
    demonstration: str

    @property
    def id(self) -> str:
        """16 hex digits of its content's SHA-256."""
        return hashlib.sha256(json.dumps([self.prompt, self.demonstration]).encode()).hexdigest()[:16]


def read(paths: Sequence[Path]) -> list[Demonstration]:
    """The demonstrations of some files, in order.

    Raises:
        RecipeError: a file that cannot be read, or a line that is not a demonstration; names file and line.
    """
    found: list[Demonstration] = []
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            try:
                data = json.loads(line)
                made = Demonstration(data["prompt"], data["demonstration"])
                assert all(isinstance(text, str) and text for text in (made.prompt, made.demonstration))
            except (ValueError, KeyError, TypeError, AssertionError):
                form = '{"prompt": "...", "demonstration": "..."}'
                raise RecipeError(f"{path}, line {number} is not of the form {form}: {line[:60]!r}") from None
            found.append(made)
    return found


def keep(run: RunDir, settings: DistillSettings) -> tuple[list[Demonstration], list[Demonstration]]:
    """What is studied and what must not be forgotten, from the run's own copies: made once, read by a resume.

    Raises:
        RecipeError: as `read`.
        RunError: the copies cannot be written.
    """
    kept = []
    for name, paths in (("distill", settings.demonstrations), ("earlier", settings.earlier)):
        copy = Path("demonstrations", f"{name}.jsonl")
        if not (run.path / copy).exists():
            read(paths)  # a mistake is told with the name of the file that holds it
            run.write_text(str(copy), "".join(f"{line}\n" for path in paths for line in _lines(path)))
        kept.append(read([run.path / copy]))
    return kept[0], kept[1]


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"demonstrations at {path} cannot be read: {error}") from None
    return text.removesuffix("\n").split("\n") if text else []  # JSON may hold what `splitlines` splits at


def draw(items: Sequence[T], count: int, step: int, seed: int) -> list[T]:
    """What a step studies: every item once before any twice, each time shuffled."""
    chosen: list[T] = []
    for position in range(step * count, (step + 1) * count if items else 0):
        around, index = divmod(position, len(items))
        order = list(range(len(items)))
        random.Random(f"{seed}/{around}/study").shuffle(order)
        chosen.append(items[order[index]])
    return chosen


def answer(
    asked: Sequence[Demonstration], engine: Engine, settings: DistillSettings, *, name: str, seed: int
) -> list[Rollout]:
    """The policy's own answers, without the demonstrations, as rollouts of one turn.

    Raises:
        SamplerError: the engine failed, or a prompt does not fit its context.
    """
    contexts = [engine.renderer.start(settings.system, each.prompt, ()) for each in asked]
    ids = [f"{name}-{each.id}-{number}" for number, each in enumerate(asked)]
    requests = [
        SampleRequest(context.ids, settings.answer_tokens, turn_seed(seed, rollout_id, 0))
        for context, rollout_id in zip(contexts, ids, strict=True)
    ]
    engine.flush()  # answers made again after a kill must come out the same
    made = []
    samples = sample_all(engine, requests)
    for rollout_id, each, context, sample in zip(ids, asked, contexts, samples, strict=True):
        turn = Turn(
            context_ids=tuple(context.ids),
            opening=context.opening,
            sampled_ids=tuple(sample.ids),
            logps=tuple(sample.logps),
            versions=sample.versions,
            finish_reason=sample.finish_reason,
            text=engine.renderer.decode(sample.ids),
            calls=(),
            observations=(),
            error_kind=None,
        )
        ended = "finished" if sample.finish_reason == "stop" else "max_tokens"
        made.append(Rollout(rollout_id, each.id, each.id, 0, seed, (turn,), Patch({}), ended, 0.0))
    return made


def hints(rollouts: Sequence[Rollout], known: Sequence[Demonstration], tasks: Sequence[Task]) -> list[Hint]:
    """For each answer its demonstration, for each attempt its task's solution: what the teacher is shown."""
    texts = {each.id: each.demonstration for each in known}
    attempts = [made for made in rollouts if made.task_id not in texts]
    found = demonstrations.solutions(attempts, {task.id: task for task in tasks})
    return [demonstrations.example(m, texts[m.task_id]) for m in rollouts if m.task_id in texts] + found


def pack(
    rollouts: Sequence[Rollout],
    hints: Sequence[Hint],
    renderer: Renderer,
    settings: FeedbackSettings,
    *,
    context_length: int,
) -> Batch:
    """The step's batch: no policy gradient, every answer a target. What cannot be used is counted."""
    usable = {
        made.id: made
        for made in rollouts
        if made.ended != "sandbox_lost" and any(turn.sampled_ids for turn in made.turns)
    }
    found, skipped = packing.targets_of(
        usable,
        hints,
        renderer,
        scope="rollout",
        placement=settings.placement,
        skip=settings.skip,
        skip_first=settings.skip_first,
        context_length=context_length,
        max_targets=settings.max_targets,
    )
    return Batch((), found, len(usable), skipped)


def example_row(each: Demonstration, renderer: Renderer, system: str) -> Row:
    """A demonstration as if it had been the policy's answer: what likelihoods are measured on."""
    context, text = renderer.start(system, each.prompt, ()), renderer.encode_message(each.demonstration)
    ids = (*context.ids, *text)
    return Row(ids, tuple(range(len(context.ids), len(ids))))


def measure(
    policy: Policy,
    renderer: Renderer,
    known: Sequence[Demonstration],
    earlier: Sequence[Demonstration],
    answers: Sequence[Row],
    system: str,
    temperature: float,
    micro_batch_tokens: int,
) -> dict[str, float]:
    """What was learnt and forgotten, in nats a token.

    `study_logp`: log-prob of the demonstrations as answers, without having read them; up is learnt. `earlier_logp`: the
    same of earlier ones; down is forgotten. `earlier_kl`: KL(before || now), estimated without bias on the answers
    that the policy gave to the earlier prompts before the phase (`answers`); 0 is nothing forgotten.
    """
    found: dict[str, float] = {}
    for name, several in (("study_logp", known), ("earlier_logp", earlier)):
        if several:
            rows = [example_row(each, renderer, system) for each in packing.subsample(several, SEEN)]
            found[name] = _mean_logp(policy, rows, 1.0, micro_batch_tokens)
    if answers:
        found["earlier_kl"] = -_mean_logp(policy, answers, temperature, micro_batch_tokens)
    return found


@torch.no_grad()
def _mean_logp(policy: Policy, rows: Sequence[Row], temperature: float, micro_batch_tokens: int) -> float:
    """Mean log-prob of the rows' wanted tokens, less the engine's own where the rows have it."""
    total = tokens = 0.0
    for chunk in packing.row_batches(rows, micro_batch_tokens):
        padded = packing.pad(chunk, policy.device)
        logp_BN = policy.logps(padded, temperature)
        total += float(((logp_BN - padded.logp_sampler_BN) * padded.mask_BN).sum())
        tokens += float(padded.mask_BN.sum())
    return total / max(tokens, 1.0)
