"""Resources that a run used and their cost, from its records alone.

Usage is counted from records, not reported by a server: tokens are the ids in the rollouts, seconds are those of
turns, verdicts and updates. Every completed batch of a run folder counts once however often it was resumed, so
nothing is counted twice. Work that was lost when a run was killed is in neither the folder nor the
ledger. Other usage is written into metrics lines under the names in `METERED`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field

from woodshed import documents
from woodshed.evals import statistics
from woodshed.evals.behaviour import prompt_lengths
from woodshed.evals.measures import Graded
from woodshed.evals.statistics import Difference
from woodshed.records import RecipeError, Rollout, Verdict
from woodshed.runs.folder import RunDir
from woodshed.runs.pace import duration
from woodshed.settings import Settings, validate

METERED = ("teacher_tokens", "trained_positions", "judge_prompt_tokens", "judge_sampled_tokens")
"""Names in a metrics line that are summed over all lines."""
HOUR_S = 3600.0
MILLION = 1e6


class ModelPrice(Settings):
    """Tokens of a served model, per million."""

    prompt: float = Field(ge=0)
    """Read for the first time."""
    cached: float | None = Field(default=None, ge=0)
    """Read again; None costs what `prompt` costs."""
    sampled: float = Field(ge=0)
    """Written."""


class Prices(Settings):
    """A dated table of prices. `evals/prices.toml` is the default; `read_prices` reads another."""

    date: str
    """Day of the table, as YYYY-MM-DD."""
    currency: str = "USD"
    gpu_hour: dict[str, float] = Field(default_factory=dict)
    """Part of a GPU's name to the price of one for one hour."""
    core_hour: dict[str, float] = Field(default_factory=dict)
    """"any" to the price of one processor core for one hour."""
    models: dict[str, ModelPrice] = Field(default_factory=dict)
    """Served name to the price of its tokens."""


class RecordedEngine(Settings, extra="ignore"):
    """The parts of an engine's description that costs depend on."""

    served: str = ""
    """Name of the served model; "" where the weights ran on this machine."""


class RecordedScore(Settings, extra="ignore"):
    """The parts of a score's origin that costs depend on."""

    engine: RecordedEngine = RecordedEngine()
    """Origin of the tokens."""


class RecordedRun(Settings, extra="ignore"):
    """The parts of a run's manifest that costs depend on."""

    gpus: tuple[str, ...] | None = None
    """Names of the GPUs at work."""
    cores: int | None = Field(default=None, ge=0)
    """Cores of the processor; one is counted if they are not known."""
    prices: Prices | None = None
    """The table that the run was made with."""
    score: RecordedScore = RecordedScore()
    """Code that made its figures."""
    wall_s: float = Field(default=0.0, ge=0)
    """Seconds for which a process worked on the run; 0 if they were not kept."""


@dataclass(frozen=True)
class Usage:
    """Resources used. Usages can be added."""

    prefill_tokens: int = 0
    """Prompt tokens that were new in their turn."""
    cached_tokens: int = 0
    """Prompt tokens that an earlier turn of the attempt had read or written."""
    decode_tokens: int = 0
    """Written by the policy."""
    teacher_tokens: int = 0
    """Read by the teacher for targeted feedback."""
    trained_positions: int = 0
    """Positions in training passes, padding included."""
    judge_prompt_tokens: int = 0
    judge_sampled_tokens: int = 0
    """Read and written by models that judge."""
    sampling_s: float = 0.0
    """Wall seconds in which the policy wrote."""
    update_s: float = 0.0
    """Wall seconds of optimizer steps."""
    tools_s: float = 0.0
    """Sandbox seconds of tool calls."""
    grading_s: float = 0.0
    """Sandbox seconds of verification."""
    attempts: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def engine_s(self) -> float:
        """Wall seconds in which the policy's weights were at work."""
        return self.sampling_s + self.update_s

    @property
    def sandbox_s(self) -> float:
        return self.tools_s + self.grading_s


Used = tuple[str, int, Usage]
"""Phase, step, and usage in it."""


@dataclass(frozen=True)
class Bill:
    """The cost of a usage, item by item."""

    items: dict[str, float]
    """Resource to its price."""
    unknown: tuple[str, ...]
    """Resources without a price in the table: the total is a lower bound."""

    @property
    def total(self) -> float:
        return sum(self.items.values())


MACHINE = ("GPU", "cores of the engine", "sandboxes")
"""Items of a bill that the machine of the run computes."""


@dataclass(frozen=True)
class Ledger:
    """A whole run."""

    phases: dict[tuple[str, int], Usage]
    """Usage by (phase, step)."""
    prices: Prices
    gpus: tuple[str, ...]
    """Names of the GPUs at work."""
    cores: int
    served: str
    """Name of the served model; "" where the weights ran on this machine."""
    problems: tuple[str, ...] = ()
    """Files that could not be read, and are not in the sums."""
    wall_s: float = 0.0
    """Seconds for which a process worked on the run, loading and waiting included; 0 if they were not kept."""

    @property
    def total(self) -> Usage:
        return sum(self.phases.values(), Usage())

    def of(self, *phases: str) -> Usage:
        """Usage of these phases, over all their steps."""
        return sum((used for (phase, _), used in self.phases.items() if phase in phases), Usage())

    def bill(self, usage: Usage) -> Bill:
        """Price of a usage. A machine is paid for as long as the run took, whatever it does in the meantime: items that
        it computes share the price of the wall time as they share the work."""
        bill = self._worked(usage)
        items = {
            name: amount * (self.overhead if name in MACHINE else 1.0) for name, amount in bill.items.items()
        }
        return Bill(items, bill.unknown)

    def _worked(self, usage: Usage) -> Bill:
        return price(usage, self.prices, gpus=self.gpus, cores=self.cores, served=self.served)

    @functools.cached_property
    def overhead(self) -> float:
        """Price of the machine for the wall time over the price of its seconds of work; 1 where either is unknown."""
        work = sum(amount for name, amount in self._worked(self.total).items.items() if name in MACHINE)
        hourly = machine_hour(self.prices, self.gpus, self.cores)
        return hourly * self.wall_s / HOUR_S / work if hourly and self.wall_s and work else 1.0

    @property
    def gpu_s(self) -> float:
        """GPU seconds of sampling and updates. Where they go on at the same time, no more than the run took."""
        busy_s = self.total.engine_s
        return (min(busy_s, self.wall_s) if self.wall_s else busy_s) * len(self.gpus)


def from_run(run: RunDir, prices: Prices | None = None) -> Ledger:
    """The ledger of a run folder, half-written ones included.

    `prices` replaces the table that the run was made with; a run that kept none gets the default.

    Raises:
        RunError: the manifest or recipe is damaged.
        RecipeError: a value in the manifest is of a wrong kind.
    """
    problems: list[str] = []
    used: list[Used] = [
        (phase, step, of_rollout(rollout))
        for phase, step, rollout in run.scan("rollouts", Rollout, problems=problems)
    ]
    used += of_verdicts(run.scan("verdicts", Verdict, problems=problems))
    used += [
        (phase, step, of_metrics(metrics)) for phase, step, metrics in run.scan("metrics", problems=problems)
    ]
    return add_up(used, run.manifest, prices, problems, origin=str(run.path / "manifest.json"))


def add_up(
    used: Iterable[Used],
    manifest: Mapping[str, Any],
    prices: Prices | None = None,
    problems: Sequence[str] = (),
    *,
    origin: str = "manifest.json",
) -> Ledger:
    """Ledger of a run from its usages and manifest.

    Raises:
        RecipeError: a value in the manifest is of a wrong kind; `origin` names the file.
    """
    phases: dict[tuple[str, int], Usage] = {}
    for phase, step, usage in used:
        phases[phase, step] = phases.get((phase, step), Usage()) + usage
    ran = validate(RecordedRun, {**manifest, "prices": prices or manifest.get("prices")}, origin=origin)
    return Ledger(
        phases,
        ran.prices or read_prices(),
        ran.gpus or (),
        ran.cores or 1,
        ran.score.engine.served,
        tuple(problems),
        ran.wall_s,
    )


def of_rollout(rollout: Rollout) -> Usage:
    """Usage of one attempt."""
    new = rollout.counters["context_tokens"]
    return Usage(
        prefill_tokens=new,
        cached_tokens=sum(prompt_lengths(rollout)) - new,
        decode_tokens=rollout.counters["sampled_tokens"],
        sampling_s=sum(turn.sample_s for turn in rollout.turns),
        tools_s=sum(turn.tools_s for turn in rollout.turns),
        attempts=1,
    )


def of_verdicts(verdicts: Iterable[tuple[str, int, Verdict]]) -> Iterator[Used]:
    """Usage of verification. Equal patches share one verification, recognised by seconds equal to the last bit."""
    counted: set[tuple[str, int, str, float]] = set()
    for phase, step, verdict in verdicts:
        verification = (phase, step, verdict.task_id, verdict.seconds)
        if verification not in counted:
            counted.add(verification)
            yield phase, step, Usage(grading_s=verdict.seconds)


def of_metrics(metrics: Mapping[str, Any]) -> Usage:
    """Usage recorded in a line of metrics."""
    counted = {name: round(value) for name in METERED if isinstance(value := metrics.get(name), int | float)}
    seconds = metrics.get("seconds")
    update_s = seconds.get("update", 0.0) if isinstance(seconds, Mapping) else 0.0
    return Usage(**counted, update_s=float(update_s))


def read_prices(path: Path | None = None) -> Prices:
    """A price table; None reads the default.

    Raises:
        RecipeError: no such file, not TOML, or not a price table.
    """
    source = Path(str(files("woodshed.evals"))) / "prices.toml" if path is None else path
    try:
        tree = documents.read_toml(source, RecipeError)
    except FileNotFoundError:
        raise RecipeError(f"price table {source} cannot be read: it is not there") from None
    return validate(Prices, tree | {"date": str(tree.get("date", ""))}, origin=str(source))


def machine_hour(prices: Prices, gpus: Sequence[str], cores: int) -> float | None:
    """Price of a machine for an hour: of its GPUs, or else its cores. None where one of them has none."""
    each = [_of_gpu(prices, gpu) for gpu in gpus] or [prices.core_hour.get("any")] * cores
    return None if None in each else sum(filter(None, each))


def _of_gpu(prices: Prices, gpu: str) -> float | None:
    return next((value for part, value in prices.gpu_hour.items() if part in gpu), None)


def price(
    usage: Usage, prices: Prices, *, gpus: Sequence[str] = (), cores: int = 1, served: str = ""
) -> Bill:
    """Price of a usage on this machine, or with a served model."""
    items: dict[str, float] = {}
    unknown: list[str] = []

    def add(item: str, amount: float, unit_price: float | None, missing: str) -> None:
        if unit_price is not None:
            items[item] = items.get(item, 0.0) + amount * unit_price
        elif amount and missing not in unknown:
            unknown.append(missing)

    core = prices.core_hour.get("any")
    no_core = "core hours: no `any` under [core_hour]"
    own_s = usage.update_s if served else usage.engine_s
    for gpu in gpus:
        add("GPU", own_s / HOUR_S, _of_gpu(prices, gpu), f"GPU {gpu!r}: no part of its name under [gpu_hour]")
    if not gpus:
        add("cores of the engine", own_s / HOUR_S * cores, core, no_core)
    add("sandboxes", usage.sandbox_s / HOUR_S, core, no_core)
    if served:
        model = prices.models.get(served)
        missing = f'served model {served!r}: no [models."{served}"] with prompt and sampled'
        cached_price = None if model is None else model.prompt if model.cached is None else model.cached
        add("prompt tokens", usage.prefill_tokens / MILLION, model and model.prompt, missing)
        add("cached tokens", usage.cached_tokens / MILLION, cached_price, missing)
        add("sampled tokens", usage.decode_tokens / MILLION, model and model.sampled, missing)
    judge = prices.models.get("judge")
    missing = 'judge tokens: no [models."judge"] with prompt and sampled'
    add("judge", usage.judge_prompt_tokens / MILLION, judge and judge.prompt, missing)
    add("judge", usage.judge_sampled_tokens / MILLION, judge and judge.sampled, missing)
    return Bill(items, tuple(unknown))


@dataclass(frozen=True)
class Costs:
    """Headline costs, in the currency of the table; None if there is nothing to divide by."""

    total: float
    per_attempt: float | None
    per_task: float | None
    """Cost of evaluation: all attempts at one task."""
    per_solved: float | None
    """Cost of evaluation for each task that at least one attempt solved."""
    training: float
    """Everything but evaluation."""
    per_additional_solve: float | None
    """Training cost / (tasks of the suite x change of the solve rate); None where nothing was gained."""
    per_additional_solve_low: float | None
    """The same with the upper end of the change's interval; the lower end often holds no gain at all."""
    unknown: tuple[str, ...]


Solves = Sequence[tuple[str, bool | None]]
"""Task of every attempt of one evaluation, and its success; None if that is not known."""


def solves(graded: Iterable[Graded]) -> Solves:
    """Task and success of every attempt of an evaluation."""
    return [(g.rollout.task_id, None if g.verdict is None or g.is_void else g.verdict.solved) for g in graded]


def costs(ledger: Ledger, evaluations: Sequence[Solves], change: Difference | None = None) -> Costs:
    """Cost per task, per solve and per additional solve.

    Args:
        evaluations: costs of evaluation are means over them.
        change: of the solve rate by training.
    """
    whole, evaluated = ledger.bill(ledger.total), ledger.bill(ledger.of("eval"))
    training = whole.total - evaluated.total
    num_attempts = sum(len(attempts) for attempts in evaluations)
    tasks = sum(len({task for task, _ in attempts}) for attempts in evaluations)
    solved = sum(len({task for task, is_solved in attempts if is_solved}) for attempts in evaluations)

    def gained(share: float | None) -> float | None:
        return training / (share * change.num_tasks) if change and share and share > 0 else None

    return Costs(
        total=whole.total,
        per_attempt=evaluated.total / num_attempts if num_attempts else None,
        per_task=evaluated.total / tasks if tasks else None,
        per_solved=evaluated.total / solved if solved else None,
        training=training,
        per_additional_solve=gained(change.value if change else None),
        per_additional_solve_low=gained(change.high if change else None),
        unknown=whole.unknown,
    )


def solve_change(evaluations: Sequence[Solves]) -> Difference | None:
    """Change of the solve rate from the first to the last evaluation, paired by task."""
    if len(evaluations) < 2:
        return None
    sides = []
    for attempts in (evaluations[0], evaluations[-1]):
        judged = [(task, float(solved)) for task, solved in attempts if solved is not None]
        ones = [1.0] * len(judged)
        sides.append(statistics.sums([solved for _, solved in judged], ones, [task for task, _ in judged]))
    return statistics.difference(*sides, is_share=True)


def brief(ledger: Ledger, costs: Costs) -> list[list[str]]:
    """The ledger in four lines of two columns: time, tokens, cost, and the cost of one task."""
    used, unit = ledger.total, ledger.prices.currency
    work = ((used.sampling_s, "sampling"), (used.update_s, "updates"), (used.sandbox_s, "sandboxes"))
    seconds = ", ".join(f"{name} {duration(spent)}" for spent, name in work if spent)
    read = used.prefill_tokens + used.cached_tokens
    cached = f" ({used.cached_tokens / read:.0%} again, from the cache)" if used.cached_tokens else ""
    span = "that long" if ledger.wall_s else "its seconds of work"
    what = "billed" if ledger.served else f"to rent such a machine for {span}: nothing was billed"
    lower = ", a lower bound" if costs.unknown else ""
    each = [
        f"{name} {_money(amount, unit)}"
        for name, amount in (
            ("attempt", costs.per_attempt),
            ("task", costs.per_task),
            ("solved task", costs.per_solved),
            ("additional solve by training", costs.per_additional_solve),
        )
        if amount is not None
    ]
    wall = duration(ledger.wall_s) if ledger.wall_s else "wall time not kept"
    return [
        ["time", f"{wall}{f' ({seconds})' if seconds else ''}"],
        ["tokens", f"{read:,} read{cached}, {used.decode_tokens:,} sampled"],
        ["cost", f"{_money(costs.total, unit)}{lower}, {what} (prices of {ledger.prices.date})"],
        ["cost for each", ", ".join(each) or "nothing was measured"],
    ]


def table(ledger: Ledger, costs: Costs) -> list[list[str]]:
    """The whole ledger for people, rows of equal length."""
    used, unit = ledger.total, ledger.prices.currency
    rows = [["used", "amount", "cost" if ledger.served else "would cost"]]
    for name, tokens in (
        ("prompt tokens, new", used.prefill_tokens),
        ("prompt tokens, from the cache", used.cached_tokens),
        ("sampled tokens", used.decode_tokens),
        ("teacher tokens", used.teacher_tokens),
        ("judge tokens", used.judge_prompt_tokens + used.judge_sampled_tokens),
    ):
        rows += [[name, f"{tokens:,}", ""]] if tokens else []
    for name, seconds in (
        ("wall time", ledger.wall_s),
        ("sampling", used.sampling_s),
        ("updates", used.update_s),
        ("sandboxes", used.sandbox_s),
        ("GPUs", ledger.gpu_s),
    ):
        rows += [[name, f"{seconds:,.0f} s", ""]] if seconds else []
    for name, amount in ledger.bill(used).items.items():
        rows += [[name, "", _money(amount, unit)]] if amount else []
    rows.append(["total", f"prices of {ledger.prices.date}", _money(costs.total, unit)])
    for name, amount in (
        ("training alone", costs.training if used.update_s or used.teacher_tokens else None),
        ("for each attempt measured", costs.per_attempt),
        ("for each task measured", costs.per_task),
        ("for each task solved", costs.per_solved),
        ("training, for each additional task solved", costs.per_additional_solve),
    ):
        rows += [[name, "", _money(amount, unit)]] if amount is not None else []
    return rows


def _money(amount: float, unit: str) -> str:
    """An amount with two digits behind the point, and more where it is small: "12.40 USD", "0.000018 USD"."""
    digits = 2 if amount >= 0.1 or not amount else 1 - math.floor(math.log10(abs(amount)))
    return f"{amount:.{digits}f} {unit}"
