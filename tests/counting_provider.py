"""Providers of sandboxes from outside of the package, as a recipe or a command names them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from woodshed.records import SandboxError
from woodshed.sandbox import Sandbox, SandboxSettings, SandboxSpec, provider
from woodshed.sandbox.bubblewrap import open_bubblewrap

NAME = "counting_provider:counting"


class Counting:
    """Bubblewrap's sandboxes, counted by their user."""

    watches = True

    def __init__(self) -> None:
        self.opened: Counter[str] = Counter()

    def open(self, spec: SandboxSpec) -> Sandbox:
        self.opened[spec.user] += 1
        return open_bubblewrap(spec)


class Opens:
    """One answer, whatever it is asked for; an exception is raised."""

    watches = False

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def open(self, spec: SandboxSpec) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Half:
    """Less than a sandbox."""

    def exec(self, command: str) -> None: ...

    def close(self) -> None: ...


counting = Counting()
raises = Opens(ValueError("no machines"))
is_full = Opens(SandboxError("all machines are taken"))
nothing = Opens(None)
half = Opens(Half())
unfit = object()
SETTINGS = SandboxSettings(provider=NAME)


@contextmanager
def nobody_else() -> Iterator[Counter[str]]:
    """Meanwhile whoever asks the default provider fails; yields what the counting one has opened since."""

    def refuse(spec: SandboxSpec) -> Sandbox:
        raise AssertionError(f"the default provider was asked for {spec}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider, "open_bubblewrap", refuse)
        counting.opened.clear()
        yield counting.opened
