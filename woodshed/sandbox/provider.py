"""Providers of sandboxes: who opens one. A recipe names one, and everybody who needs a sandbox is handed it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Annotated, Protocol

from woodshed.boundary import described
from woodshed.parts import Part, misfit
from woodshed.records import RecipeError, SandboxError, WoodshedError
from woodshed.sandbox.bubblewrap import open_bubblewrap
from woodshed.sandbox.ray_nodes import RayNodes
from woodshed.sandbox.spec import Sandbox, SandboxSpec
from woodshed.sandbox.unsafe import SubprocessSandbox
from woodshed.settings import Settings


class SandboxProvider(Protocol):
    """Opens sandboxes. Capacity, retries and placement are its own affair. Calls from several threads are safe."""

    @property
    def watches(self) -> bool:
        """True if `SandboxSpec.watch` can be asked of it."""
        ...

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Open a running sandbox.

        Raises:
            SandboxError: it cannot be made (the message says what to do), or a path is missing.
        """
        ...


@dataclass(frozen=True)
class Bubblewrap:
    """Linux namespaces on this machine, by bubblewrap."""

    watches: bool = True

    def open(self, spec: SandboxSpec) -> Sandbox:
        return open_bubblewrap(spec)


@dataclass(frozen=True)
class Unprotected:
    """Ordinary processes of this user, which protect nothing: for one's own code where there are no user namespaces.

    It can neither watch commands nor show files outside the workspace, so it makes attempts and grades none.
    """

    unsafe: bool = False
    """Must be True: whoever opens one says that nothing is protected."""
    watches: bool = False

    def open(self, spec: SandboxSpec) -> Sandbox:
        if not self.unsafe:
            raise SandboxError(
                "the unprotected provider protects nothing: use bubblewrap, or say unsafe=True in a test"
            )
        return SubprocessSandbox(spec)


@dataclass(frozen=True)
class OwnProvider:
    """A provider of the user's own, whose mistakes are told with its name."""

    name: str
    provider: SandboxProvider

    @property
    def watches(self) -> bool:
        return self.provider.watches

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Open a sandbox.

        Raises:
            SandboxError: the provider's own.
            RecipeError: it raised something else, or returned no `Sandbox`.
        """
        try:
            sandbox = self.provider.open(spec)
        except WoodshedError:
            raise
        except Exception as error:
            raise RecipeError(
                f"sandbox provider {self.name!r} raised {described(error)}; a sandbox that cannot be made is a "
                "SandboxError, anything else is a mistake in the provider"
            ) from error
        if fault := misfit(sandbox, Sandbox):
            raise RecipeError(
                f"sandbox provider {self.name!r} opened a {type(sandbox).__name__}, which {fault}"
            )
        return sandbox


class Revocable:
    """A provider whose sandboxes can all be closed from outside, also in mid-command; then it opens no more."""

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider
        self._lock, self._opened, self._closed = threading.Lock(), list[Sandbox](), False

    @property
    def watches(self) -> bool:
        return self._provider.watches

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Open a sandbox. Raises SandboxError also after `close`."""
        if self._closed:
            raise SandboxError("the work was broken off")
        sandbox = self._provider.open(spec)
        with self._lock:
            if not self._closed:
                self._opened.append(sandbox)
                return sandbox
        sandbox.close()  # closed while this one was being opened
        raise SandboxError("the work was broken off")

    def close(self) -> None:
        """Close every sandbox that was opened. Closing twice is fine."""
        with self._lock:
            self._closed, opened, self._opened = True, self._opened, []
        for sandbox in opened:
            sandbox.close()


BUBBLEWRAP: SandboxProvider = Bubblewrap()
"""The default, for a caller without a recipe."""
PROVIDERS: dict[str, SandboxProvider] = {"bubblewrap": BUBBLEWRAP, "ray": RayNodes()}
"""Those that can make attempts and grade them, by the name that a recipe gives them."""
PROVIDER = Part("sandbox provider", PROVIDERS, like=SandboxProvider)


class SandboxSettings(Settings):
    """The provider of sandboxes for untrusted code."""

    provider: Annotated[str, PROVIDER] = "bubblewrap"
    """Provider of sandboxes: bubblewrap, on this machine; ray, bubblewrap on every node of a Ray cluster; or an object
    of your own (package.module:name) with `open(spec)`."""

    def create(self) -> SandboxProvider:
        """The provider.

        Raises:
            RecipeError: it cannot be imported, or is no provider.
        """
        provider = PROVIDER.resolve(self.provider)
        return provider if self.provider in PROVIDERS else OwnProvider(self.provider, provider)

    def check(self) -> None:
        """Open a sandbox of nothing with any provider but the default, so that mistakes are found before the work.

        Raises:
            RecipeError: as `create`, or as `OwnProvider.open`.
            SandboxError: it can open none.
        """
        if self.provider != "bubblewrap":
            self.create().open(SandboxSpec(())).close()
