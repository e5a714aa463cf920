"""Pins of a repository's environment: what the package needs, and what its tests would like to have."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from woodshed.records import Environment, TaskError
from woodshed.sandbox import SandboxProvider
from woodshed.synthesis import project, requirements, source_wheels
from woodshed.synthesis.direct_wheels import DirectWheels
from woodshed.tasks.environment import BUILT, NoWheelError, resolve

PYTEST = frozenset("colorama exceptiongroup iniconfig packaging pluggy pygments tomli".split())
"""Distributions that pytest requires: public names, which no folder of a repository makes its own."""
CONSTRAINED = re.compile(r"\(constraint\) ([\w.-]+)")
"""A version of a lock file in pip's words about a conflict."""
MOST_GIVEN_UP = 8
"""Requirements of tests that are given up one by one; each costs a question to the package index."""


def environment_of(
    described: project.Project, extra: Sequence[str], sandboxes: SandboxProvider
) -> tuple[Environment, project.Project]:
    """Pins for the package and its tests. Requirements of tests alone may be dropped, with the reason.

    Raises:
        TaskError: the package's own requirements cannot be had, or bring what the repository itself holds.
    """
    origin = described.inside.origin
    ours = origin is not None and origin.is_ours
    own = described.distribution.partition("==")[0]
    wheels = DirectWheels(own, described.python, sandboxes, described.packages, ours)
    needed = wheels.pinned([*described.requirements, *(_own_or_asked(text, described) for text in extra)])
    wishes, given_up = _built_wishes(described.test_requirements, wheels)
    wishes += [*described.plugins, *_metadata_of(described.described, wheels)]
    index = _Index(described.python, sandboxes, dict(described.lock.versions), described.lock.name)
    pins, dropped = index.pins(needed, wishes, described.plugins)
    if _own_among(pins, described):
        circular = _circular(wishes, described)
        wishes, demanded = ([w for w in some if w not in circular] for some in (wishes, described.plugins))
        pins, dropped = index.pins(needed, wishes, demanded)
        dropped += [f"{text}: it requires a copy of what the repository itself holds" for text in circular]
    for name in _own_among(pins, described):
        _refuse_own(name, "pytest or a requirement of the package or of its tests needs it", described)
    environment = Environment(
        python=described.python,
        requirements=pins,
        packages=described.packages,
        source_roots=described.source_roots,
        distribution=described.distribution,
        entry_points=described.entry_points,
    )
    return environment, replace(described, left_out=(*described.left_out, *given_up, *dropped))


def _own_or_asked(text: str, described: project.Project) -> str:
    """One of extra_requirements: of the repository itself by its place, another one as it is.

    Raises:
        TaskError: it is of the repository, and not to be had there.
    """
    name = re.split(r"[\s<>=!~;(\[@]", text)[0]
    source = described.inside.source(name)
    if source and canonicalize_name(name) not in described.inside.homes:
        return f"{name} @ {source}"
    _refuse_own(name, "it was asked for as one of extra_requirements", described)
    return text


def _built_wishes(listed: Sequence[str], wheels: DirectWheels) -> tuple[list[str], list[str]]:
    """Requirements of tests with wheels for those that have an address, and those that cannot be built."""
    wishes, given_up = list[str](), list[str]()
    for text in listed:
        try:
            wishes += wheels.pinned([text])
        except TaskError as error:
            given_up.append(f"{text}: {error}")
    return list(dict.fromkeys(wishes)), given_up


def _metadata_of(listed: Sequence[str], wheels: DirectWheels) -> Iterator[str]:
    """Pins of the metadata of projects in the tree, which code may ask for; of those that can be built."""
    for text in listed:
        with contextlib.suppress(TaskError):
            yield wheels.described(text)


@dataclass
class _Index:
    """Pins, from what pip finds for one version of Python."""

    python: str
    sandboxes: SandboxProvider
    locked: dict[str, str]
    """Versions that are kept to as far as they can be had."""
    lock: str
    """Name of their file."""
    built: set[str] = field(default_factory=set)

    def pins(
        self, needed: Sequence[str], wishes: Sequence[str], demanded: Sequence[str]
    ) -> tuple[tuple[str, ...], list[str]]:
        """Pins, and the requirements dropped for them: missing releases first, then missing packages, then the rest.
        What there is only as source is built."""
        given_up, failed, wishes = list[str](), dict[str, str](), list(wishes)
        for _ in range(MOST_GIVEN_UP):
            try:
                return self._resolved([*needed, *wishes]), given_up
            except NoWheelError as error:
                name = canonicalize_name(re.split(r"[\s<>=!~;(\[]", error.requirement)[0])
                if name in self.locked:
                    given_up += self._unlocked(name)
                    continue
                if name not in failed:
                    failed[name] = self._build_failure(error.requirement)
                    if not failed[name]:
                        continue
                lost = [text for text in wishes if canonicalize_name(Requirement(text).name) == name]
                if not lost:
                    break
                why = f"no package index has a wheel of it for this Python, and {failed[name]}"
                given_up += [f"{text}: {why}" for text in lost]
                wishes = [text for text in wishes if text not in lost]
                wishes += [text for text in requirements.relaxed(lost) if text not in lost]
            except TaskError as error:
                if not self.locked:
                    break
                conflicting = {*map(canonicalize_name, CONSTRAINED.findall(str(error)))} & self.locked.keys()
                lost = sorted(conflicting or self.locked)
                given_up.append(f"{self.lock}: its versions of {', '.join(lost)} are not kept to. {error}")
                self.locked = {name: v for name, v in self.locked.items() if name not in lost}
        for tried in (requirements.relaxed(wishes), requirements.relaxed(demanded), []):
            try:
                return self._resolved([*needed, *tried]), given_up
            except TaskError as error:
                if not tried:
                    why = "; ".join(f"{name}: {text}" for name, text in failed.items() if text)
                    raise TaskError(f"{error}{chr(10) if why else ''}{why}") from None
                given_up.append(f"{', '.join(tried)}: cannot be installed together. {error}")
        raise AssertionError("the last try is without any wish")

    def _resolved(self, wanted: Sequence[str]) -> tuple[str, ...]:
        built = {canonicalize_name(Requirement(text).name) for text in wanted if BUILT.search(text)}
        bounds = [f"{name}=={version}" for name, version in self.locked.items() if name not in built]
        return resolve(wanted, python=self.python, constraints=bounds)

    def _unlocked(self, name: str) -> list[str]:
        """Build a version of the lock file, or let go of it; return why."""
        pin = f"{name}=={self.locked[name]}"
        why = self._build_failure(pin) if pin not in self.built else "pip does not take what was built of it"
        self.built.add(pin)
        if why:
            del self.locked[name]
        return (
            [f"{pin} of {self.lock} is not kept to: it has no wheel for this Python, and {why}"]
            if why
            else []
        )

    def _build_failure(self, requirement: str) -> str:
        """Build a wheel from source; return why that is not possible, "" where it was done."""
        try:
            source_wheels.build(Requirement(requirement), self.sandboxes, self.python)
        except (InvalidRequirement, TaskError) as error:
            return str(error)
        return ""


def _own_among(pins: Sequence[str], described: project.Project) -> list[str]:
    """Names of pins that stand for something that the repository itself holds."""
    ours = described.distribution.partition("==")[0]
    names = [pin.partition("==")[0] for pin in pins if not BUILT.search(pin)]
    return [name for name in names if name == ours or (name not in PYTEST and described.inside.holds(name))]


def _circular(wishes: Sequence[str], described: project.Project) -> list[str]:
    """Requirements of the tests, plugins above all, that bring a copy of the package with them."""

    def brings(text: str) -> bool:
        try:
            return bool(_own_among(resolve([text], python=described.python), described))
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
