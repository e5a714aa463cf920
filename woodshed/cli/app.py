"""The application that all commands share: errors as messages and exit codes, and common tables."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from woodshed import __version__
from woodshed.cli.terminal import say, say_columns, tell
from woodshed.parts import blamed, own
from woodshed.records import RunError, SamplerError, SandboxError, WoodshedError, to_json
from woodshed.runs.files import WAYS_OUT, created, way_out

if TYPE_CHECKING:
    from woodshed.agent.deployment import DeploymentSettings
    from woodshed.engines.engine import Engine
    from woodshed.evals.evaluation import Evaluation
    from woodshed.evals.measures import MeasureRow, Summary
    from woodshed.evals.statistics import Estimate
    from woodshed.runs.folder import RunDir
    from woodshed.settings import Settings
    from woodshed.stages.recipe import Recipe


ORDER = [  # of the commands in --help
    "doctor",
    "init",
    "tasks",
    "warmup",
    "eval",
    "train",
    "solve",
    "serve",
    "variants",
    "settings",
    "grade",
    "report",
    "view",
    "export",
    "monitor",
    "child",
]


EXTRAS = dict.fromkeys(("torch", "peft", "safetensors", "accelerate", "gguf"), "train") | dict.fromkeys(
    ("starlette", "uvicorn"), "gateway"
)
"""Libraries that not every installation has, and the extra of the package that brings each."""


class Commands(TyperGroup):
    """Command group that turns errors into messages and exit codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for parameter in _parameters(self):
            parameter.display_type = functools.partial(_in_words, parameter)

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        try:
            with blamed():
                result = super().invoke(ctx)
            sys.stdout.flush()
        except typer.BadParameter as error:
            if error.param is not None and error.message.startswith("Input should be"):
                error.message = f"give {_wanted(error.param)}"
            raise
        except WoodshedError as error:
            tell(f"{type(error).__name__}: {error}")
            raise typer.Exit(2) from None
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            tell(
                f"ModelError: this needs {error.name}; install it with pip install 'woodshed[{EXTRAS[error.name]}]'"
            )
            raise typer.Exit(2) from None
        except Failed as failed:
            tell(str(failed))
            raise typer.Exit(3) from None
        except BrokenPipeError:
            # The reader (`| head`) has gone: nothing more can be said to it, also not when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except OSError as error:
            if error.errno not in WAYS_OUT or (error.errno == errno.EINVAL and not error.filename):
                raise
            file_name = f" {shortened(str(error.filename))}:" if error.filename else ""
            advice = way_out(error)
            tell(f"OSError:{file_name} {os.strerror(error.errno)}. {advice[0].upper()}{advice[1:]}")
            raise typer.Exit(2) from None
        except Interrupted as stopped:
            tell(f"\ninterrupted; {stopped}")
            raise typer.Exit(130) from None
        except KeyboardInterrupt:
            tell("\ninterrupted; nothing was started")
            raise typer.Exit(130) from None
        return result


def _parameters(command: Any) -> Iterator[Any]:
    """Options and arguments of a command and of those inside it."""
    yield from command.params
    for inner in getattr(command, "commands", {}).values():
        yield from _parameters(inner)


def _in_words(parameter: Any, ctx: Any) -> str:
    """The kind of an option's values in a person's words, instead of a type of Python; "" behind an argument's name."""
    kind = parameter.type_descriptor
    if parameter.param_type_name == "argument":
        return ""
    if kind.is_path:
        return "PATH"
    names = {"int": "NUMBER", "int range": "NUMBER", "float": "NUMBER", "float range": "NUMBER"}
    return names.get(kind.ranged_type_name if kind.is_ranged else parameter.bare_type(), "TEXT")


def _wanted(parameter: Any) -> str:
    """The values of an option in words: "a whole number, from 1"."""
    kind = parameter.type_descriptor
    name = kind.ranged_type_name if kind.is_ranged else parameter.bare_type()
    words = {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(name, "another value")
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    limits = [f"from {low}"] * (low is not None) + [f"to {high}"] * (high is not None)
    return f"{words}, {' '.join(limits)}" if limits else words


def shortened(path: str) -> str:
    """A path of readable length: both ends of a long one."""
    return path if len(path) <= 200 else f"{path[:120]}...{path[-60:]}"


class Interrupted(Exception):
    """Ctrl-C during work; the message says what is kept."""


class Failed(Exception):
    """Failure of an engine or sandbox during work; the message says what is kept."""


class Evaluations(TyperGroup):
    """`woodshed eval TASKS` is short for `woodshed eval run TASKS`, whose options its help shows."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        run = self.commands["run"]
        with formatter.section("Options of `eval TASKS`, which is `eval run TASKS`"):
            formatter.write_dl(
                [record for each in run.get_params(ctx) if (record := each.get_help_record(ctx))]
            )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        short = args and args[0] not in self.commands and args[0] != "--help"
        return super().parse_args(ctx, ["run", *args] if short else args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, "run")


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train a coding agent on your own repositories.",
    epilog="First time here: woodshed doctor, then docs/first-run.md. Names completed by the shell: woodshed "
    "--install-completion, and a new shell.",
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        say(f"woodshed {__version__}")
        raise typer.Exit


@app.callback()
def _everywhere(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


tasks_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tasks_app, name="tasks", help="Turn repositories into practice tasks, and prove them.")

eval_app = typer.Typer(cls=Evaluations, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(
    eval_app,
    name="eval",
    help="Measure a model on tasks, and compare runs.\n\n`eval TASKS` is short for `eval run TASKS`.",
)
monitor_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(monitor_app, name="monitor", help="Measure the monitors that watch for cheating.")


def _settings_beginning(incomplete: str) -> list[str]:
    """Settings of a recipe for the shell's completion: "rl.ste" becomes "rl.steps="."""
    from woodshed.settings import leaves
    from woodshed.stages.recipe import Recipe

    return [f"{name}=" for name, _ in leaves(Recipe) if name.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE",
        help="Settings to change, such as rl.steps=2 (see woodshed settings).",
        autocompletion=_settings_beginning,
    ),
]


def _can_be_written(path: Path | None) -> Path | None:
    """Check before the work that its output file can be written; nothing is left behind."""
    try:
        if path is not None and path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path is not None:
            with created(path.parent), tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}; name another file") from None
    return path


def apart(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names and settings of a command line: `tasks/mine agent.max_turns=8` is one of each; `toolz==1.2.0` is a name."""
    names, settings = [], []
    for word in words:
        (settings if re.match(r"[A-Za-z_]\w*(\.\w+)*=(?!=)", word) else names).append(word)
    return names, settings


OUT_FILE = {"dir_okay": False, "callback": _can_be_written}
"""Arguments of an option that names an output file."""


def open_engine(chosen: DeploymentSettings) -> Engine:
    """The engine of a policy in use: servers, a kind of the user's own, or weights loaded here."""
    from woodshed.engines.create import create, needs_model, starts_servers
    from woodshed.engines.speech import refuse_text_only
    from woodshed.tokens.codec import refuse_lossy
    from woodshed.tokens.renderer import create_renderer

    if chosen.engine.kind == "chat":
        from woodshed.tokens.text_renderer import TextRenderer

        named = [
            s if s.model else s.model_copy(update={"model": chosen.model}) for s in chosen.engine.servers
        ]
        return create(chosen.engine.model_copy(update={"servers": tuple(named)}), TextRenderer(chosen.codec))
    if chosen.engine.kind == "http":
        refuse_text_only(chosen.engine.servers)
    if starts_servers(chosen.engine):
        return _start_servers(chosen)
    if needs_model(chosen.engine):
        from woodshed.engines import local

        adapter = Path(chosen.adapter) if chosen.adapter else None
        loaded = local.load(chosen.model, dtype=chosen.dtype, adapter=adapter)
        model, tokenizer, folder = loaded.model, loaded.tokenizer, loaded.directory
    else:
        from woodshed.tokens.model_files import load_tokenizer

        model, (tokenizer, folder) = None, load_tokenizer(chosen.model)
    renderer = create_renderer(tokenizer, codec=chosen.codec, model_dir=folder)
    if own(chosen):  # a codec or a tool
        refuse_lossy(renderer.codec, chosen.agent.tools.specs)
    return create(chosen.engine, renderer, model)


def _start_servers(chosen: DeploymentSettings) -> Engine:
    """The engine of servers that are started for a policy in use, and end with it."""
    from woodshed.engines.create import create
    from woodshed.engines.servers import ServedModel
    from woodshed.tokens.model_files import load_tokenizer
    from woodshed.tokens.renderer import create_renderer

    tokenizer, folder = load_tokenizer(chosen.model)
    renderer = create_renderer(tokenizer, codec=chosen.codec, model_dir=folder)
    adapter = Path(chosen.adapter) if chosen.adapter else None
    rank = json.loads((adapter / "adapter_config.json").read_text())["r"] if adapter else 0
    tell(f"starting {chosen.engine.kind}, which takes minutes at times")
    logs = Path(tempfile.mkdtemp(prefix="woodshed-engines-"))
    served = ServedModel(folder, chosen.dtype, lora_rank=rank, adapter=adapter)
    return create(chosen.engine, renderer, served=served, folder=logs)


def name_servers(overrides: Iterable[str]) -> None:
    """Allow sending API keys to servers named on the command line; those in a recipe may be anybody's."""
    from woodshed.engines.http import trust

    for key, _, value in (text.partition("=") for text in overrides):
        if re.fullmatch(r"(.*\.)?endpoint\.url|engine\.servers(\.\d+\.url)?", key.strip()):
            for url in re.findall(r"https?://[^\s\"']+", value):
                trust(url)


def open_variant(text: str) -> list[RunDir]:
    """The run, or several runs with different seeds, joined by commas.

    Raises:
        RunError: there is no run at one of the paths.
    """
    from woodshed.runs.folder import RunDir

    names = [text] if Path(text).exists() else [name for name in text.split(",") if name]
    return [RunDir.open(Path(name)) for name in names or [text]]


def say_own_parts(chosen: Settings) -> None:
    """Say which code of the user's own is about to run."""
    for name in own(chosen):
        tell(f"imports {name}, from {Path.cwd()} or an installed package")


def say_run(run: RunDir) -> None:
    """Print the headline of a run: its first against its last evaluation, or the only one."""
    from woodshed.evals import conclusion, evaluation, variants
    from woodshed.monitors import drift

    evaluations = evaluation.from_run(run, problems=[])
    if reason := variants.stopped(run, problems=[]):
        tell(reason)
    if repeats := variants.repeats(run, problems=[]):
        tell(repeats)
    for alarm in drift.from_run(run, problems=[]):
        tell(f"alarm at step {alarm.step}, {alarm.kind}: {alarm.text}")
    if len(evaluations) > 1:
        rows = evaluation.before_after(evaluations[0], evaluations[-1])
        say(conclusion.conclude(rows))
        say_rows(rows)
        say_effort(evaluations[0], evaluations[-1])
    elif evaluations:
        say_summary(evaluations[0].summary)
    if evaluations:
        say_flags(evaluations[-1])


def say_rows(rows: Sequence[MeasureRow], names: tuple[str, str] = ("before", "after")) -> None:
    from woodshed.evals import conclusion, measures

    table = [["", *names, "change [95% interval]", "smallest detectable"]]
    for row in rows:
        sides = (row.before, row.after)
        change = measures.write_change(row.measure, row.change)
        visible = measures.write_detectable(row.measure, row.change.detectable)
        figures = [measures.write_estimate(row.measure, side) for side in sides]
        table.append([row.measure.label, *figures, change, visible])
        table.append(["", *(measures.write_counts(row.measure, side) for side in sides), "", ""])
    say_columns(table)
    for row in rows:
        if why := conclusion.why_unclear(row):
            say(f"{row.measure.label}: {why}")


def say_effort(before: Evaluation, after: Evaluation) -> None:
    """Print tokens by difficulty in two evaluations; nothing if all tasks are equally hard."""
    from woodshed.evals import effort

    spent = [effort.spent_on(side.graded) for side in (before, after)]
    difficulty = effort.difficulties(itertools.chain(*spent))
    sides = [effort.by_difficulty(side, difficulty) for side in spent]
    if min(map(len, sides)) < 2:
        return
    table = [["difficulty", "tasks", "tokens before", "after", "solved before", "after"]]
    for a, b in zip(*sides, strict=False):
        figures = [f"{e.value or 0.0:.0f}" for e in (a.tokens, b.tokens)]
        figures += [f"{100 * (e.value or 0.0):.0f}%" for e in (a.solved, b.solved)]
        table.append([f"{a.low:g} to {a.high:g}", str(a.num_tasks), *figures])
    say_columns(table)
    correlations = [effort.calibration(side, difficulty) for side in spent]
    texts = ["-" if value is None else f"{value:+.2f}" for value in correlations]
    say(f"rank correlation of effort and difficulty: before {texts[0]}, after {texts[1]}")


def describe(chosen: DeploymentSettings | Recipe) -> dict[str, Any]:
    """Manifest of a new run, without the conditions that its evaluations add. It spells the tools out, so that whoever
    reads the run need not import those of the user's own."""
    from woodshed.evals import changes, ledger
    from woodshed.runs import machine

    prices = ledger.read_prices().model_dump(mode="json", exclude_none=True)
    tools = [to_json(tool) for tool in chosen.agent.tools.specs]
    own_part = {"seed": chosen.seed, "prices": prices, "tools": tools}
    return machine.describe() | own_part | changes.settings_of(chosen)


def say_costs(run: RunDir, prices: Path | None = None, *, is_brief: bool = True) -> tuple[str, ...]:
    """Print the ledger of a run, in four lines or whole; return the records that could not be read."""
    from woodshed.evals import evaluation, ledger

    ledger_of_run = ledger.from_run(run, ledger.read_prices(prices) if prices else None)
    attempts = [ledger.solves(each.graded) for each in evaluation.from_run(run, problems=[])]
    costs = ledger.costs(ledger_of_run, attempts, ledger.solve_change(attempts))
    say_columns((ledger.brief if is_brief else ledger.table)(ledger_of_run, costs))
    for missing in ledger_of_run.bill(ledger_of_run.total).unknown:
        tell(
            f"no price for {missing}; the total is a lower bound (table of {ledger_of_run.prices.date}; --prices FILE)"
        )
    for problem in ledger_of_run.problems:
        tell(f"left out: {problem}")
    return ledger_of_run.problems


def say_summary(summary: Summary) -> None:
    from woodshed.evals import measures

    table = [["", "figure [95% interval]", "counted", "smallest detectable"]]
    solved = next(measure for measure in measures.MEASURES if measure.key == "solved")
    figures: list[tuple[measures.Figure, str, Estimate]] = []
    for measure in measures.MEASURES:
        figures.append((measure, measure.label, summary.estimates[measure.key]))
        for name, figure in summary.passes.items() if measure.key == "solved" else ():
            if name[5:] != "1":
                figures.append((measures.pass_figure(name), measures.pass_figure(name).label, figure))
    if summary.num_void:
        figures.append((solved, "solve rate, void attempts as failures", summary.strict["solved"]))
    for measure, label, estimate in figures:
        figure, counts = measures.write_estimate(measure, estimate), measures.write_counts(measure, estimate)
        table.append([label, figure, counts, measures.write_detectable(measure, estimate.detectable)])
    say_columns(table)
    say(f"tasks {summary.num_tasks}, attempts {summary.num_attempts}, of these void {summary.num_void}")


def say_flags(evaluation: Evaluation) -> None:
    """The rules behind the hack rate of an evaluation, the most frequent one first."""
    rules = Counter(rule for each in evaluation.graded for rule in {flag.rule for flag in each.flags or ()})
    if rules:
        named = ", ".join(f"{rule} in {count}" for rule, count in rules.most_common())
        say(f"rules behind the hack rate, by attempts: {named}; `woodshed view` shows the evidence")


def free_name(name: str) -> str:
    """`name`, or `name-2`, `name-3`, ... if runs of that name exist."""
    existing = {path.name for path in Path("runs").glob(f"{name}*")}
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(existing) + 3))) if n not in existing)


@contextmanager
def keeping(line: str, run: RunDir | None = None, *, is_new: bool = False) -> Iterator[None]:
    """Tell the user what is kept when Ctrl-C or a failure stops the work inside, then unlock the run.

    A new run that stops at a mistake before anything was done in it is deleted, so that its name is free for the
    corrected command.
    """
    try:
        with blamed():
            yield
    except KeyboardInterrupt:
        raise Interrupted(line) from None
    except (SamplerError, SandboxError) as error:
        if run is None:
            raise
        raise Failed(f"{type(error).__name__}: {error}\n{line}") from error
    except (WoodshedError, OSError) as error:
        if run is not None and is_new and not isinstance(error, RunError):  # which says how to go on
            run.forget()
        raise
    finally:
        if run is not None:
            run.unlock()
