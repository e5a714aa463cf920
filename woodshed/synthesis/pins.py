"""Pins of a repository's environment: what the package needs, and what its tests would like to have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from woodshed.records import Environment, TaskError
from woodshed.sandbox import SandboxProvider
from woodshed.synthesis import project, requirements, source_wheels
from woodshed.tasks.environment import NoWheelError, resolve

PYTEST = frozenset("colorama exceptiongroup iniconfig packaging pluggy pygments tomli".split())
"""Distributions that pytest requires: public names, which no folder of a repository makes its own."""
MOST_GIVEN_UP = 8
"""Requirements of tests that are given up one by one; each costs a question to the package index."""


def environment_of(
    described: project.Project, extra: Sequence[str], sandboxes: SandboxProvider
) -> tuple[Environment, project.Project]:
    """Pins for the package and its tests. Requirements of tests alone may be dropped, with the reason.

    Raises:
        TaskError: the package's own requirements cannot be had, or bring what the repository itself holds.
    """
    needed = [*described.requirements, *extra]
    for text in extra:
        _refuse_own(
            re.split(r"[\s<>=!~;(\[@]", text)[0], "it was asked for as one of extra_requirements", described
        )
    wishes = [*described.test_requirements, *described.plugins]
    pins, given_up = _pins(needed, wishes, described.plugins, sandboxes)
    if _own_among(pins, described):
        circular = _circular(wishes, described)
        wishes, demanded = ([w for w in some if w not in circular] for some in (wishes, described.plugins))
        pins, given_up = _pins(needed, wishes, demanded, sandboxes)
        given_up += [f"{text}: it requires a copy of what the repository itself holds" for text in circular]
    for name in _own_among(pins, described):
        _refuse_own(name, "pytest or a requirement of the package or of its tests needs it", described)
    environment = Environment(
        python=project.PYTHON,
        requirements=pins,
        packages=described.packages,
        source_roots=described.source_roots,
        distribution=described.distribution,
        entry_points=described.entry_points,
    )
    return environment, replace(described, left_out=(*described.left_out, *given_up))


def _pins(
    needed: Sequence[str], wishes: list[str], demanded: Sequence[str], sandboxes: SandboxProvider
) -> tuple[tuple[str, ...], list[str]]:
    """Pins, and the requirements dropped for them: missing releases first, then missing packages, then the rest. What
    there is only as source is built."""
    given_up, failed = list[str](), dict[str, str]()
    for _ in range(MOST_GIVEN_UP):
        try:
            return resolve([*needed, *wishes], python=project.PYTHON), given_up
        except NoWheelError as error:
            name = canonicalize_name(re.split(r"[\s<>=!~;(\[]", error.requirement)[0])
            if name not in failed:
                failed[name] = _build_failure(error.requirement, sandboxes)
                if not failed[name]:
                    continue
            lost = [text for text in wishes if canonicalize_name(Requirement(text).name) == name]
            if not lost:
                break
            why = f"no package index has a wheel of it for this Python, and {failed[name]}"
            given_up += [f"{text}: {why}" for text in lost]
            wishes = [text for text in wishes if text not in lost]
            wishes += [text for text in requirements.relaxed(lost) if text not in lost]
        except TaskError:
            break
    for tried in (requirements.relaxed(wishes), requirements.relaxed(demanded), []):
        try:
            return resolve([*needed, *tried], python=project.PYTHON), given_up
        except TaskError as error:
            if not tried:
                why = "; ".join(f"{name}: {text}" for name, text in failed.items() if text)
                raise TaskError(f"{error}{chr(10) if why else ''}{why}") from None
            given_up.append(f"{', '.join(tried)}: cannot be installed together. {error}")
    raise AssertionError("the last try is without any wish")


def _build_failure(requirement: str, sandboxes: SandboxProvider) -> str:
    """Build a wheel from source; return why that is not possible, "" where it was done."""
    try:
        source_wheels.build(Requirement(requirement), sandboxes)
    except (InvalidRequirement, TaskError) as error:
        return str(error)
    return ""


def _own_among(pins: Sequence[str], described: project.Project) -> list[str]:
    """Names of pins that stand for something that the repository itself holds."""
    ours = described.distribution.partition("==")[0]
    names = [pin.partition("==")[0] for pin in pins]
    return [name for name in names if name == ours or (name not in PYTEST and described.inside.place(name))]


def _circular(wishes: Sequence[str], described: project.Project) -> list[str]:
    """Requirements of the tests, plugins above all, that bring a copy of the package with them."""

    def brings(text: str) -> bool:
        try:
            return bool(_own_among(resolve([text], python=project.PYTHON), described))
        except TaskError:
            return False  # what cannot be had brings nothing

    with ThreadPoolExecutor(4) as pool:
        return [text for text, own in zip(wishes, pool.map(brings, wishes), strict=True) if own]


def _refuse_own(name: str, cause: str, described: project.Project) -> None:
    """Raise a TaskError if a package from an index would replace one that the repository itself holds."""
    ours = described.distribution.partition("==")[0]
    if canonicalize_name(name) == ours:
        raise TaskError(
            f"{ours} is needed by pytest or another requirement of its own tests, so a second copy of it would be "
            "installed beside the workspace; such a repository cannot be made into tasks"
        )
    if place := described.inside.place(name):
        raise TaskError(
            f"{ours}: {name} is of the repository itself ({place}), and never fetched from a package index, where the "
            f"name may be a stranger's; {cause}. Give a source that holds one of the two only"
        )
