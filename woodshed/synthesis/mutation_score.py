"""Sensitivity of the hidden tests: mutants of the original code that they fail, and answers that need no work.

A function whose tests accept wrong versions invites special cases; one whose tests accept `return None` asks for
nothing. Measured once per function, with the tests that cover it, whatever operator takes it away.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from woodshed.grading import session
from woodshed.pysource import syntax
from woodshed.pysource.edits import apply
from woodshed.sandbox import SandboxProvider, SandboxSpec
from woodshed.synthesis.baseline import settled
from woodshed.synthesis.mutations import mutants
from woodshed.synthesis.names import Codebase
from woodshed.synthesis.operators.bodies import body_edit
from woodshed.synthesis.operators.deletion import Symbol, find_function

MUTANTS = 10
TRIVIAL = (
    "return None",
    "return 0",
    'return ""',
    "return []",
    "return True",
    'return __import__("unittest.mock").mock.MagicMock()',
)
"""Bodies that do nothing, the last with an object that says yes to most questions. To return the first argument comes
on top."""
EQUAL = (
    'return type("Any", (), {"__eq__": lambda a, b: True, "__ne__": lambda a, b: False, "__hash__": None})()'
)
"""An object that is equal to everything: `==` alone does not tell it from the right answer."""


@dataclass(frozen=True)
class MutationScore:
    """Sensitivity of the tests that cover a function."""

    mutants: int
    """Mutants that could be tried, at most MUTANTS."""
    noticed: int
    trivial: tuple[str, ...]
    """Trivial bodies that all of the tests accept."""
    accepts_equal: bool
    """True if an object that is equal to everything passes all of the tests."""


def measure(
    spec: SandboxSpec,
    code: Codebase,
    symbol: Symbol,
    tests: Sequence[str],
    timeout_s: float,
    sandboxes: SandboxProvider,
    options: Sequence[str] = (),
) -> MutationScore:
    """Try mutants and trivial bodies of one function, in one sandbox."""
    source = code.modules[symbol.path].source
    function = find_function(source, symbol.name)
    chosen = _versions(code, symbol)
    texts = [*chosen]
    arguments = [*function.args.posonlyargs, *function.args.args]
    lines = [*TRIVIAL, *(f"return {a.arg}" for a in arguments[:1] if a.arg not in ("self", "cls"))]
    texts += [
        apply(source.text, [body_edit(source, function, symbol.name, line=line)]) for line in [*lines, EQUAL]
    ]
    answers = _probe(spec, symbol, tests, texts, timeout_s, sandboxes, options)
    tried, trivial = answers[: len(chosen)], answers[len(chosen) :]
    accepted = [line for line, answer in zip(lines, trivial, strict=False) if answer == "p"]
    return MutationScore(
        len(tried) - tried.count("s"), tried.count("k"), tuple(accepted), trivial[len(lines) :] == "p"
    )


def _versions(code: Codebase, symbol: Symbol) -> list[str]:
    """The file with one mutant in the function, for a seeded choice of them."""
    source = code.modules[symbol.path].source
    all_mutants = mutants(source, find_function(source, symbol.name))
    chosen = random.Random(symbol.name).sample(all_mutants, min(MUTANTS, len(all_mutants)))
    return [apply(source.text, [mutant.edit]) for mutant in chosen]


def noticed(
    spec: SandboxSpec,
    code: Codebase,
    symbol: Symbol,
    tests: Sequence[str],
    timeout_s: float,
    sandboxes: SandboxProvider,
    options: Sequence[str] = (),
) -> list[str]:
    """Texts of the function's file with one mutant each, as far as the tests fail with it."""
    texts = _versions(code, symbol)
    answers = _probe(spec, symbol, tests, texts, timeout_s, sandboxes, options)
    return [text for text, answer in zip(texts, answers, strict=False) if answer == "k"]


def _probe(
    spec: SandboxSpec,
    symbol: Symbol,
    tests: Sequence[str],
    texts: Sequence[str],
    timeout_s: float,
    sandboxes: SandboxProvider,
    options: Sequence[str] = (),
) -> str:
    """A letter for every text (see `mutation_runner`); "" where there was no answer.

    Raises:
        TimeoutError, SandboxError: as `settled`.
    """
    runner = Path(__file__).with_name("mutation_runner.py")
    binds = {**spec.binds, "/run/woodshed/woodshed_mutation_runner.py": runner}
    with sandboxes.open(replace(spec, binds=binds)) as sandbox:
        request: Mapping[str, object] = {
            "ids": list(tests),
            "options": list(options),
            "workspace": sandbox.workspace,
            "versions": [{"path": symbol.path, "name": symbol.name, "text": syntax.plain(t)} for t in texts],
            "out": "/tmp/probe",
        }
        result = sandbox.exec(
            session.PYTHON + "/run/woodshed/woodshed_mutation_runner.py",
            stdin=json.dumps(request).encode(),
            timeout_s=timeout_s,
            max_output=1 << 14,
        )
        settled(result, f"trying versions of {symbol.name}")
        return sandbox.read("/tmp/probe").decode() if result.outcome == "ok" else ""
