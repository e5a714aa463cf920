"""Candidates of a repository: features of every operator, in a seeded order, and combinations of what was proven."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

from woodshed.synthesis.discovery import FINDERS, Feature, discover
from woodshed.synthesis.operators import LEVELS, Symbol
from woodshed.synthesis.repository_context import Candidate, RepositoryContext
from woodshed.synthesis.test_writing import functions_to_test

T = TypeVar("T")

COMBINED_SHARE = 8
"""One task in so many is a combination of others, where combinations are asked for."""
COMBINABLE = ("stub", "remove", "remove_class", "remove_cluster", "gut_class")


def candidates(work: RepositoryContext) -> list[Candidate]:
    """Features of every operator, the better ones earlier, in seeded order: operators take turns, and so do modules."""
    settings = work.settings
    repository = work.baseline.repository.name
    wanted = [o for o in settings.operators if o in FINDERS and LEVELS[o] in settings.levels]
    times = Counter(s.name.lower() for s in work.survey.symbols)
    queues = []
    for operator in wanted:
        draw = random.Random(f"{settings.seed} {repository} {operator}")
        features = discover(work.survey, operator)
        weight = {id(feature): feature.score * draw.uniform(0.5, 1.5) for feature in features}
        queues.append(
            by_turns(sorted(features, key=lambda feature: -weight[id(feature)]), lambda f: f.symbol.path)
        )
    named: dict[str, Candidate] = {}
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue):
                candidate = _candidate(repository, queue[turn], times)
                named.setdefault(candidate.name.lower(), candidate)
    return by_turns(list(named.values()), lambda c: (c.symbol.path, c.symbol.name))


def by_turns(items: Sequence[T], key: Callable[[T], Hashable]) -> list[T]:
    """The same items, reordered so that keys take turns: every key once, then every key that has more, and so on."""
    nth: Counter[Hashable] = Counter()
    turns = []
    for item in items:
        turns.append((nth[key(item)], len(turns), item))
        nth[key(item)] += 1
    return [item for *_, item in sorted(turns, key=lambda turn: turn[:2])]


def _candidate(repository: str, feature: Feature, times: Counter[str]) -> Candidate:
    symbol = feature.symbol
    place = f"{symbol.module}." if times[symbol.name.lower()] > 1 else ""
    name = f"{repository}-{feature.operator}-{place}{symbol.name}{_suffix(symbol)}"
    return Candidate(name, feature.operator, symbol, feature.tests)


def _suffix(symbol: Symbol) -> str:
    """The detail of a symbol as the end of a folder's name."""
    if not symbol.detail:
        return ""
    text = re.sub(r"[^A-Za-z0-9_]+", "-", symbol.detail).strip("-")[:40]
    if text != symbol.detail:
        digest = hashlib.sha256(symbol.detail.encode()).hexdigest()[:6]
        text = f"{text}-{digest}" if text else digest
    return f"-{text}"


def combinations(work: RepositoryContext, proven: Sequence[Candidate]) -> list[Candidate]:
    """Pairs of proven candidates in different files that different tests cover, each candidate at most once.

    Each finds its partner among those before it, so that a higher limit leaves earlier pairs as they are.
    """
    settings = work.settings
    if "combine" not in settings.operators or LEVELS["combine"] not in settings.levels:
        return []
    waiting: list[Candidate] = []
    pairs = []
    for one in (c for c in proven if c.operator in COMBINABLE):
        other = next(
            (c for c in waiting if c.symbol.path != one.symbol.path and not c.tests & one.tests), None
        )
        if other is None:
            waiting.append(one)
        else:
            waiting.remove(other)
            pairs.append(_pair(work.baseline.repository.name, other, one))
    return pairs


def _pair(repository: str, one: Candidate, other: Candidate) -> Candidate:
    parts = tuple(replace(c.symbol, detail=f"{c.operator} {c.symbol.detail}".strip()) for c in (one, other))
    symbol = replace(one.symbol, kind="combination", parts=parts, detail="")
    names = [c.name.removeprefix(f"{repository}-") for c in (one, other)]
    return Candidate(
        f"{repository}-combine-{'-and-'.join(names)}", "combine", symbol, one.tests | other.tests
    )


def derivations(work: RepositoryContext, proven: Sequence[Candidate]) -> list[Candidate]:
    """Impossible twins of proven candidates, one for every COMBINED_SHARE of them, and functions to write tests for."""
    repository, derived = work.baseline.repository.name, []
    if "impossible" in work.settings.operators and proven:
        draw = random.Random(f"{work.settings.seed} {repository} impossible")
        for parent in draw.sample(list(proven), max(1, len(proven) // COMBINED_SHARE)):
            symbol = replace(parent.symbol, detail=parent.name)
            derived.append(Candidate(f"{parent.name}-impossible", "impossible", symbol, parent.tests))
    if "write_tests" in work.settings.operators:
        for function in functions_to_test(work):
            name = f"{repository}-write_tests-{function.module}.{function.name}"
            derived.append(Candidate(name, "write_tests", function, work.survey.tests(function)))
    return derived
