"""Weights of a server: which ones write the next message, how new ones take their place, and how a server that died and
came back gets them again.

Adapters have a name for each version, so a message in the middle stays on its own, and it is unloaded after the last
message that uses it. For whole weights the messages in the middle are cut, and go on with the new ones. What a request
is answered with belongs to one version only: a request that was sent before an update, and answered after it without
being cut, is asked again.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, RLock
from typing import Any, NoReturn, Protocol

import httpx

from woodshed.engines.published import Canary, Published, Receiver
from woodshed.records import SamplerError

MOST_GAP = 0.1
"""Mean distance in nats of a server's log-probs from the trainer's, on the same prompt, above which its weights are
others. In bfloat16 equal weights differ by 0.02 to 0.06."""
DRAIN_S = 1.0
"""Longest wait for the answers of messages that were cut."""


class Send(Protocol):
    """One call of a server, tried again where it fails for the moment; raises SamplerError."""

    def __call__(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response: ...


@dataclass(frozen=True)
class Sampling:
    """Weights that a request is answered with."""

    model: str
    """Name that the server knows them by."""
    version: int
    salt: str
    """Keys and values in the server's cache are found again under the same salt only."""
    updates: int
    """Updates of whole weights so far."""


class ServerWeights:
    """Weights of one server.

    Args:
        model: name of the served model.
        send, score: calls of the server; `score` gives the log-probs of a prompt's tokens but the first.
        receiver: holds whole weights for servers that load them.
    """

    def __init__(
        self,
        url: str,
        model: str,
        send: Send,
        score: Callable[[str, tuple[int, ...]], tuple[float, ...]],
        receiver: Receiver,
    ) -> None:
        self.url, self.served = url, model
        self._send, self._score, self._receiver = send, score, receiver
        self._token = secrets.token_hex(4)  # a server outlives runs, which count their versions alike
        self._loads = 0
        self._now = Sampling(model, 0, f"{self._token}-0", 0)
        self._changed = Condition()
        self._is_held = False
        self._users: Counter[Sampling] = Counter()
        self._updating = RLock()
        self._adapter: tuple[Path, Published] | None = None
        self._lifeline: socket.socket | None = None
        """An idle connection, which breaks when the server dies; None before it got weights."""
        self._failure = ""
        self.canary_gap = 0.0
        """Nats at the last update,"""
        self.stage_s = self.hold_s = 0.0
        """its seconds before the server heard of it, and those in which no message was written or begun."""

    @property
    def now(self) -> Sampling:
        return self._now

    @contextmanager
    def sampling(self) -> Iterator[Sampling]:
        """Weights for one request, which are not unloaded while this is open. Waits while they are replaced.

        Raises:
            SamplerError: the server came back without them and does not take them, or never took them.
        """
        if self._is_lost():
            self._mend()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            if self._failure:
                raise SamplerError(self._failure)
            now = self._now
            self._users[now] += 1
        try:
            yield now
        finally:
            with self._changed:
                self._users[now] -= 1
                is_last = not self._users[now] and now != self._now
                self._changed.notify_all()
            if is_last:
                self._retire(now)

    def belongs(self, answered: Sampling) -> bool:
        """True if an answer that comes now was written by the weights that its request was sent for."""
        return answered.updates == self._now.updates

    def update(self, folder: Path, version: int) -> None:
        """Let the server write every later token with a published version.

        Raises:
            SamplerError: the version is damaged, and nothing has changed; or the server does not take it.
        """
        begun = time.monotonic()
        with self._updating, self._receiver.received(folder) as (checked, published):
            self.stage_s, self.hold_s = time.monotonic() - begun, 0.0
            self._load(checked, replace(published, version=version))

    def close(self) -> None:
        with self._changed:
            self._is_held, self._failure = False, self._failure or "the engine was closed"
            self._changed.notify_all()
        if self._lifeline is not None:
            self._lifeline.close()

    def _load(self, folder: Path, published: Published) -> None:
        """Give the server weights that are known to be whole, and see that it computes with them."""
        if self._lifeline is None or self._is_lost():
            before, self._lifeline = self._lifeline, self._connect()
            if before is not None:
                before.close()
        load = self._load_adapter if published.kind == "adapter" else self._load_whole
        try:
            load(folder, published)
        except SamplerError as error:
            with self._changed:
                self._failure, self._is_held = str(error), False
                self._changed.notify_all()
            raise

    def _load_adapter(self, folder: Path, published: Published) -> None:
        before = self._now
        for _ in range(2):
            new = self._named(published.version, before.updates)
            new = replace(new, model=f"woodshed-{new.salt}")
            body = {"lora_name": new.model, "lora_path": str(folder.resolve())}
            self._send("POST", "/v1/load_lora_adapter", body)
            if self._agrees(new.model, published.canary):
                break
            self._send("POST", "/v1/unload_lora_adapter", {"lora_name": new.model})
        else:
            self._refuse(published)
        self._adapter = folder, published
        with self._changed:
            self._now = new
            is_unused = not self._users[before]
        if is_unused:
            self._retire(before)

    def _load_whole(self, folder: Path, published: Published) -> None:
        """Cut the messages in the middle and load, while later ones wait."""
        begun = time.monotonic()
        with self._changed:
            self._is_held = True
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
        for _ in range(2):
            self._send("POST", "/pause?mode=abort&clear_cache=true")
            try:
                self._send("POST", "/collective_rpc", body)
                with self._changed:
                    self._changed.wait_for(lambda: not +self._users, DRAIN_S)
                    self._now = self._named(published.version, self._now.updates + 1)
            finally:
                self._send("POST", "/resume")
            if self._agrees(self.served, published.canary):
                break
        else:
            self._refuse(published)
        self.hold_s = time.monotonic() - begun
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def _named(self, version: int, updates: int) -> Sampling:
        self._loads += 1
        return Sampling(self.served, version, f"{self._token}-{self._loads}", updates)

    def _retire(self, old: Sampling) -> None:
        """Unload an adapter that no message uses any more."""
        with self._changed:
            self._users.pop(old, None)
        if old.model != self.served:
            with suppress(SamplerError):  # it went with a server that died
                self._send("POST", "/v1/unload_lora_adapter", {"lora_name": old.model})

    def _agrees(self, model: str, canary: Canary | None) -> bool:
        """True if the server finds the trainer's log-probs."""
        if canary is None:
            return True
        pairs = list(zip(self._score(model, canary.ids), canary.logps, strict=True))
        self.canary_gap = sum(abs(a - b) for a, b in pairs) / len(pairs)
        return self.canary_gap <= MOST_GAP

    def _refuse(self, published: Published) -> NoReturn:
        raise SamplerError(
            f"{self.url} took new weights (version {published.version}) twice, and is {self.canary_gap:.3f} nats a "
            f"token from them, above {MOST_GAP:g}: it goes on with old ones, in part at least, or is of another model. "
            "Serve that of the recipe, in the precision of policy.dtype; to train whole weights, a copy of it in whose "
            "config tie_word_embeddings is false, or train an adapter (policy.lora_rank above 0)"
        )

    # --- a server that died and came back -------------------------------------------------------------------------

    def _connect(self) -> socket.socket | None:
        """An idle connection. None behind TLS, where one that says nothing is closed."""
        parsed = httpx.URL(self.url)
        if parsed.scheme != "http":
            return None
        try:
            made = socket.create_connection((parsed.host, parsed.port or 80), timeout=10.0)
        except OSError:
            return None
        made.setblocking(False)
        return made

    def _is_lost(self) -> bool:
        """True if the server has died since it got its weights."""
        lifeline = self._lifeline
        if lifeline is None:
            return False
        try:
            return lifeline.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _mend(self) -> None:
        """Give the server that came back the weights that it had."""
        with self._updating:
            if not self._is_lost() or self._failure:
                return
            with self._changed:
                self._is_held = True
            try:
                self._send("GET", "/v1/models")  # as soon as it answers
                if self._adapter is not None:
                    self._now = replace(self._now, model=self.served)  # its adapters are gone
                    self._load(*self._adapter)
                else:
                    with self._receiver.held() as (folder, published):
                        self._load(folder, published)
            finally:
                with self._changed:
                    self._is_held = False
                    self._changed.notify_all()
