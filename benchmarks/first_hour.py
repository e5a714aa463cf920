"""A stranger's first hour: their repository, their model, their result, by the commands that `woodshed init` prints.

    python benchmarks/first_hour.py FOLDER [--install] [--json FILE]

Makes in FOLDER a repository as businesses have them (a private package, an environment variable that the tests need, a
slow marker, classes that conftest imports) and a tiny random model with a tokenizer of its own. Then it types what a
stranger would, no setting among it: init, the tasks, a training that Ctrl-C stops after its first step, its resume, an
evaluation and the report. Prints every command with its output and seconds. With --install the commands are those
of a wheel of this tree, installed into an environment of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from woodshed.runs import machine

WHAT = "A stranger's first hour: init, tasks, a warm-up, practice, Ctrl-C, resume, evaluation and report"
ROOT = Path(__file__).resolve().parent.parent

MODULES = {
    "money": '''
"""Amounts of money."""
from acme_money import cents


class Account:
    """An account with a balance in cents."""

    def __init__(self, owner, balance=0):
        self.owner, self.balance = owner, balance

    def deposit(self, amount):
        """Add an amount, which must be positive."""
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += cents(amount)
        return self.balance

    def withdraw(self, amount):
        """Take an amount away; the balance never falls below zero."""
        wanted = cents(amount)
        if wanted > self.balance:
            raise ValueError("not enough money")
        self.balance -= wanted
        return self.balance


def share(total, parts):
    """Split cents into equal parts; the first ones take what is left over."""
    each, rest = divmod(total, parts)
    return [each + (number < rest) for number in range(parts)]


def percent(part, whole):
    """Share in percent with one digit; 0.0 of nothing."""
    if not whole:
        return 0.0
    return round(100 * part / whole, 1)


def written(amount, sign="EUR"):
    """An amount of cents as people write it."""
    whole, rest = divmod(abs(amount), 100)
    minus = "-" if amount < 0 else ""
    return f"{minus}{whole}.{rest:02d} {sign}"
''',
    "invoices": '''
"""Invoices and their lines."""


class Invoice:
    """An invoice of lines (text, count, cents each)."""

    def __init__(self, number, lines=()):
        self.number, self.lines, self.paid = number, list(lines), 0

    def add(self, text, count, each):
        """Add a line."""
        if count < 1:
            raise ValueError("count must be at least 1")
        self.lines.append((text, count, each))

    def total(self):
        """Cents of all lines."""
        return sum(count * each for _, count, each in self.lines)

    def pay(self, cents):
        """Take a payment; what is too much comes back."""
        left = self.total() - self.paid
        taken = min(left, cents)
        self.paid += taken
        return cents - taken

    def is_paid(self):
        """True if nothing is left to pay."""
        return self.paid >= self.total()


def discount(total, percent, most):
    """Cents after a discount of at most so many cents."""
    cut = min(total * percent // 100, most)
    return total - cut


def overdue(days, limits=(14, 30, 60)):
    """Number of limits that were passed."""
    return sum(days > limit for limit in limits)


def numbered(prefix, year, count):
    """Number of an invoice, such as R-2026-0007."""
    return f"{prefix}-{year}-{count:04d}"
''',
    "stock": '''
"""Goods in stock."""


def reorder(levels, least, pack):
    """Packs to order of each good that is below its least number."""
    orders = {}
    for name, count in sorted(levels.items()):
        if count < least:
            missing = least - count
            orders[name] = -(-missing // pack)
    return orders


def merge(first, second):
    """Counts of two stores together."""
    total = dict(first)
    for name, count in second.items():
        total[name] = total.get(name, 0) + count
    return total


def take(levels, name, count):
    """Stock after some of a good was taken."""
    if levels.get(name, 0) < count:
        raise KeyError(name)
    return {**levels, name: levels[name] - count}


def average(costs):
    """Average cost of (count, cents) lots, rounded down."""
    counts = sum(count for count, _ in costs)
    if counts == 0:
        return 0
    return sum(count * cents for count, cents in costs) // counts


def oldest(lots, count):
    """Lots (day, number) that are used up first."""
    used = []
    for day, number in sorted(lots):
        if count <= 0:
            break
        used.append((day, min(number, count)))
        count -= number
    return used
''',
    "texts": '''
"""Texts for letters and labels."""


def initials(name):
    """Initials of a name, such as A.L."""
    return "".join(f"{word[0].upper()}." for word in name.split())


def wrapped(words, width):
    """Lines of at most so many characters."""
    lines, line = [], ""
    for word in words.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line] if line else lines


def slug(title):
    """A title as part of an address."""
    kept = [c.lower() if c.isalnum() else "-" for c in title]
    return "-".join(part for part in "".join(kept).split("-") if part)


def masked(number, shown=4):
    """A number of which only the end is shown."""
    hidden = max(len(number) - shown, 0)
    return "*" * hidden + number[hidden:]


def plural(count, one, many):
    """A count with its noun."""
    return f"{count} {one if count == 1 else many}"
''',
}
TESTS = {
    "conftest": """
import os

import pytest

from ledger.invoices import Invoice
from ledger.money import Account

REGION = os.environ["LEDGER_REGION"]


@pytest.fixture
def account():
    return Account("Ada", 1000)


@pytest.fixture
def invoice():
    return Invoice("R-1", [("pen", 2, 150), ("ink", 1, 700)])
""",
    "test_money": """
import time

import pytest

from ledger.money import percent, share, written


def test_deposit(account):
    assert account.deposit(2.5) == 1250
    with pytest.raises(ValueError):
        account.deposit(0)


def test_withdraw(account):
    assert account.withdraw(4) == 600
    with pytest.raises(ValueError):
        account.withdraw(7)
    assert account.balance == 600


@pytest.mark.parametrize("total, parts, expected", [(10, 3, [4, 3, 3]), (9, 3, [3, 3, 3]), (2, 4, [1, 1, 0, 0])])
def test_share(total, parts, expected):
    assert share(total, parts) == expected


def test_percent():
    assert percent(1, 3) == 33.3 and percent(5, 0) == 0.0 and percent(2, 2) == 100.0


def test_written():
    assert written(1205) == "12.05 EUR" and written(-7, "CHF") == "-0.07 CHF"


@pytest.mark.slow
def test_a_night_of_bookings(account):
    time.sleep(30)
    assert account.balance == 1000
""",
    "test_invoices": """
import pytest

from ledger.invoices import discount, numbered, overdue


def test_add_and_total(invoice):
    assert invoice.total() == 1000
    invoice.add("cap", 3, 50)
    assert invoice.total() == 1150 and invoice.lines[-1] == ("cap", 3, 50)
    with pytest.raises(ValueError):
        invoice.add("cap", 0, 50)


def test_pay(invoice):
    assert invoice.pay(400) == 0 and not invoice.is_paid()
    assert invoice.pay(700) == 100 and invoice.is_paid() and invoice.paid == 1000


def test_discount():
    assert discount(1000, 10, 500) == 900 and discount(1000, 90, 500) == 500 and discount(99, 10, 50) == 90


def test_overdue():
    assert [overdue(days) for days in (0, 14, 15, 31, 61)] == [0, 0, 1, 2, 3] and overdue(5, (1,)) == 1


def test_numbered():
    assert numbered("R", 2026, 7) == "R-2026-0007" and numbered("X", 1999, 12345) == "X-1999-12345"
""",
    "test_stock": """
import os

import pytest

from ledger.stock import average, merge, oldest, reorder, take


def test_reorder():
    assert reorder({"pen": 3, "ink": 12, "cap": 9}, 10, 4) == {"pen": 2, "cap": 1}
    assert reorder({"pen": 10}, 10, 4) == {}


def test_merge():
    first = {"a": 1}
    assert merge(first, {"a": 2, "b": 3}) == {"a": 3, "b": 3} and first == {"a": 1}


def test_take():
    assert take({"a": 5, "b": 1}, "a", 2) == {"a": 3, "b": 1} and take({"a": 2}, "a", 2) == {"a": 0}
    with pytest.raises(KeyError):
        take({"a": 1}, "a", 2)


def test_average():
    assert average([(2, 100), (1, 130)]) == 110 and average([]) == 0 and average([(3, 10)]) == 10


def test_oldest():
    assert oldest([(2, 5), (1, 4)], 6) == [(1, 4), (2, 2)] and oldest([(1, 4)], 0) == []
    assert oldest([(1, 4)], 9) == [(1, 4)]


def test_region():
    assert os.environ["LEDGER_REGION"] in ("north", "south")
""",
    "test_texts": """
from ledger.texts import initials, masked, plural, slug, wrapped


def test_initials():
    assert initials("ada lovelace") == "A.L." and initials("") == "" and initials("Kay") == "K."


def test_wrapped():
    assert wrapped("one two three", 7) == ["one two", "three"] and wrapped("", 5) == []
    assert wrapped("abcdefgh x", 4) == ["abcdefgh", "x"] and wrapped("a b", 3) == ["a b"]


def test_slug():
    assert slug("Hello, World!") == "hello-world" and slug("A  b") == "a-b" and slug("--") == ""


def test_masked():
    assert masked("12345678") == "****5678" and masked("123") == "123" and masked("12345", 2) == "***45"


def test_plural():
    assert plural(1, "day", "days") == "1 day" and plural(0, "day", "days") == "0 days"
""",
}
PYPROJECT = """
[project]
name = "ledger"
version = "1.4"
dependencies = ["acme-money>=1"]

[project.optional-dependencies]
test = ["pytest"]

[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
packages = ["ledger"]

[tool.pytest.ini_options]
addopts = "-m 'not slow'"
markers = ["slow: runs at night"]
"""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Typed:
    """A command, its answer and its cost."""

    command: str
    seconds: float
    code: int
    lines: list[str]


def make_repository(folder: Path) -> Path:
    """The repository `ledger` under git, and beside it a folder with the wheel of its private requirement."""
    repository = folder / "ledger"
    for name, text in MODULES.items():
        _write(repository / "ledger" / f"{name}.py", text)
    for name, text in TESTS.items():
        _write(repository / "tests" / f"{name}.py", text)
    _write(repository / "ledger" / "__init__.py", '"""Books of a small business."""\n')
    _write(repository / "pyproject.toml", PYPROJECT)
    for arguments in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=A", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", str(repository), *arguments], check=True, env=machine.git_environment())
    make_private_wheel(folder / "wheels")
    return repository


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.lstrip("\n"), encoding="utf-8")


def make_private_wheel(folder: Path) -> None:
    """acme-money 1.0, which no public index has."""
    folder.mkdir(parents=True)
    info = "acme_money-1.0.dist-info"
    files = {
        "acme_money/__init__.py": '"""Money of Acme."""\n\n\ndef cents(amount):\n    return round(amount * 100)\n',
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: acme-money\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / "acme_money-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(name, text)


def make_model(folder: Path, repository: Path) -> Path:
    """A random Llama of about a million weights, its tokenizer trained on the repository."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text("utf-8") for path in sorted(repository.rglob("*.py"))]
    prompts = [path.read_text("utf-8") for path in sorted((ROOT / "woodshed" / "agent").rglob("*.py"))]
    core.train_from_iterator([*texts, *prompts], trainer)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=marks[1],
        eos_token=marks[2],
        pad_token=marks[2],
        chat_template=TEMPLATE,
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 8,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Terminal:
    """The stranger's terminal: types commands in one folder and keeps what they answer."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.python = folder, python
        self.typed: list[Typed] = []
        self.environment = {
            **{name: value for name, value in machine.git_environment().items() if name != "PYTHONPATH"},
            "PIP_FIND_LINKS": str(folder / "wheels"),
            "LEDGER_REGION": "north",
        }

    def type(self, command: str, *, stop_when: Path | None = None, wanted: tuple[int, ...] = (0,)) -> Typed:
        """Run a command; with `stop_when` press Ctrl-C once that file speaks of a step of training.

        Raises:
            SystemExit: the command ends with another code than wanted.
        """
        print(f"\n$ {command}", flush=True)
        program, *words = shlex.split(command)
        started = time.monotonic()
        line = [self.python, "-m", "woodshed", *words] if program == "woodshed" else [program, *words]
        with subprocess.Popen(
            line,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as running:
            if stop_when is not None:
                threading.Thread(
                    target=_interrupt, args=(running, self.folder / stop_when), daemon=True
                ).start()
            lines = []
            for answer in running.stdout or ():
                lines.append(answer.rstrip("\n"))
                print(f"  {answer}", end="", flush=True)
        done = Typed(command, round(time.monotonic() - started, 1), running.wait(), lines)
        print(f"  [{done.seconds:.1f} s, exit code {done.code}]", flush=True)
        self.typed.append(done)
        if done.code not in wanted:
            sys.exit(f"{command} ended with {done.code}")
        return done


def _interrupt(running: subprocess.Popen[str], metrics: Path) -> None:
    """Send Ctrl-C once a step of practice is on record."""
    while running.poll() is None:
        if metrics.is_file() and '"phase":"train"' in metrics.read_text("utf-8").replace(": ", ":"):
            running.send_signal(signal.SIGINT)
            return
        time.sleep(0.2)


def advised(answer: Typed, word: str) -> str:
    """The command with a word that an answer names to be run next."""
    found = [line.partition("next: ")[2] for line in answer.lines if line.startswith("next: ")]
    found += [text for line in answer.lines for text in re.findall(r"resume with: (woodshed .*)", line)]
    return next(command for command in found if f" {word}" in command)


def install(folder: Path, terminal: Terminal) -> str:
    """A wheel of this tree in an environment of its own; returns that Python."""
    terminal.type(f"{sys.executable} -m pip wheel --no-deps --quiet --wheel-dir {folder / 'dist'} {ROOT}")
    (wheel,) = (folder / "dist").glob("woodshed-*.whl")
    terminal.type(f"{sys.executable} -m venv {folder / 'venv'}")
    python = str(folder / "venv" / "bin" / "python")
    terminal.type(
        f"{python} -m pip install --quiet --constraint {ROOT / 'requirements/constraints.txt'} {wheel}[train]"
    )
    return python


def first_hour(folder: Path, *, installs: bool = False) -> dict[str, Any]:
    """Everything that the stranger does; returns the commands with their answers, and what came of them."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it, and what they start
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    repository = make_repository(folder)
    make_model(folder / "tiny", repository)
    terminal = Terminal(folder, sys.executable)
    if installs:
        terminal.python = install(folder, terminal)
    else:
        terminal.environment["PYTHONPATH"] = str(ROOT)
    begun = terminal.type("woodshed init ledger --model tiny")
    terminal.type(advised(begun, "tasks make"))
    stopped = terminal.type(
        advised(begun, "train"), stop_when=Path("runs/ledger/metrics.jsonl"), wanted=(0, 130)
    )
    if stopped.code == 130:
        terminal.type(advised(stopped, "--resume"))
    terminal.type("woodshed eval tasks/ledger --model runs/ledger/policy --limit 4")
    terminal.type(advised(begun, "report").removesuffix(" --open"))
    return {
        "what": WHAT,
        "commands": [asdict(each) for each in terminal.typed],
        "seconds": round(sum(each.seconds for each in terminal.typed), 1),
        "load": os.getloadavg()[0],
        "machine": machine.describe(),
    }


def main() -> None:
    """Run it, and write the figures."""
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--install", action="store_true", help="from a wheel, in an environment of its own")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = first_hour(options.folder, installs=options.install)
    print(f"\n{len(figures['commands'])} commands, {figures['seconds'] / 60:.1f} minutes")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
