"""One end of the line: values written and read, objects numbered, questions asked and answered."""

from __future__ import annotations

import contextlib
import os
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from . import values
from .line import LineError, MessageLine
from .stand_ins import (
    NUMBER,
    RemoteType,
    fields_of,
    is_remote,
    number_of,
    stand_in,
)

MOST_CAUSES = 5
SHOWN_CHARS = 100_000


class Peer:
    """All that both ends have in common; `tests_side` and `code_side` say what each of them does for the other."""

    def __init__(self, line: MessageLine):
        self.line, self.count = line, 0
        self.lent: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.times_sent: dict[int, int] = {}
        self.held: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.times_got: dict[int, int] = {}
        self.dropped: list[list[int]] = []
        self.types: dict[int, Any] = {}
        self.told: set[int] = set()
        self.turn = threading.RLock()
        self.serves_in: int | None = None
        """The one thread that may ask, where the other side listens only while it waits for an answer."""
        self.sent: list[Any] = []
        """Containers in the message that is being written, in order: the answer says how they were changed."""
        self.got: list[Any] = []
        """Containers in the message that is being read, in the same order."""
        self.given: dict[int, int] = {}
        """Containers of the question that is being answered, by identity: an answer may hold them."""

    # -- what the two ends do differently

    def do(self, verb: str, arguments: list[Any], content: list[Any]) -> Any:
        """Do what the other side asks; `content` is what it wrote for the arguments."""
        raise NotImplementedError

    def may_lend(self, value: Any) -> bool:
        raise NotImplementedError

    def named(self, module: Any, name: Any) -> Any:
        raise NotImplementedError

    def name_of(self, value: Any) -> list[str] | None:
        """Name of an installed type or function, if the other side takes it for the thing."""
        raise NotImplementedError

    def module(self, name: str, number: int) -> Any:
        raise NotImplementedError

    def news(self) -> dict[str, Any]:
        """All that the other side should know before it goes on."""
        dropped, self.dropped = self.dropped, []
        return {"dropped": dropped} if dropped else {}

    def hear(self, news: dict[str, Any]) -> None:
        for entry in news.get("dropped", ()):
            number, times = entry
            if number not in self.times_sent or type(times) is not int:
                raise LineError("an object that was not lent was dropped")
            self.times_sent[number] -= times
            if self.times_sent[number] <= 0:
                value = self.lent.pop(number)
                del self.numbers[id(value)], self.times_sent[number]

    def answer(self, name: str, ask: Callable[..., Any], subject: Any, arguments: tuple) -> Any:
        """See `stand_ins.Asker`."""
        return ask(subject, *arguments)

    # -- questions and answers

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The answer of the other side. Meanwhile it may ask in its turn.

        Raises:
            LineError: the line broke.
            RuntimeError: from a thread to which the other side would not listen.
        """
        with self.turn:
            if self.serves_in not in (None, threading.get_ident()):
                raise RuntimeError("a thread of its own cannot ask the other process")
            outer, self.sent = self.sent, []
            try:
                content, mine = [self.encode(argument) for argument in arguments], self.sent
            finally:
                self.sent = outer
            self.line.send([verb, content, self.news()])
            while True:
                kind, content, news = self.line.receive()
                self.hear(news)
                if kind == "answer":
                    value, changed = content
                    self.got.clear()
                    if not (verb == "special" and arguments[1] in values.COMPARING):
                        self._apply(mine, changed)
                    return self.decode(value, mine)
                if kind == "raise":
                    raise self._error(content)
                self.serve(kind, content)

    def serve(self, verb: str, content: list) -> None:
        """Do what the other side asks, and answer."""
        outer = self.got, self.given, self.sent
        self.got, self.given, self.sent = [], {}, []
        try:
            arguments = [self.decode(value) for value in content]
            mine, self.got = self.got, []
            before = [self._state(container) for container in mine]
            result = self.do(verb, arguments, content)
            self.given = {id(container): place for place, container in enumerate(mine)}
            answer = ["answer", [self.encode(result), self._changes(mine, before)], self.news()]
        except KeyboardInterrupt:
            raise
        except LineError:
            raise
        except BaseException as error:
            self.given = {}
            answer = ["raise", [self.encode(error)], self.news()]
        finally:
            self.got, self.given, self.sent = outer
        self.line.send(answer)

    def _state(self, container: Any) -> Any:
        """A shallow copy, to see later if a container was changed."""
        return list(container.items()) if isinstance(container, dict) else list(container)

    def _changes(self, containers: Sequence[Any], before: Sequence[Any]) -> list:
        found = []
        for place, (container, old) in enumerate(zip(containers, before, strict=True)):
            new = self._state(container)
            if len(new) != len(old) or any(
                a is not b and not _same_pair(a, b) for a, b in zip(new, old, strict=True)
            ):
                given, self.given = self.given, {}
                found.append([place, self.encode(new)])
                self.given = given
        return found

    def _apply(self, mine: Sequence[Any], changed: Any) -> None:
        for place, new in changed:
            old, value = mine[place], self.decode(new)
            if type(value) is not list:
                raise LineError("a change that is no list")
            old.clear()
            old.update(value) if isinstance(old, dict | set) else old.extend(value)

    def _error(self, content: list) -> BaseException:
        error = self.decode(content[0])
        if not isinstance(error, BaseException):
            raise LineError("not an exception")
        return error

    # -- values written

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -values.BIG < value < values.BIG else ["int", hex(value)]
        if kind is float:
            return ["float", value.hex()]
        if kind is bytes:
            return ["bytes", value.hex()]
        if id(value) in self.given:
            return ["given", self.given[id(value)]]
        if kind in values.CHANGEABLE:
            self.sent.append(value)
        if kind is bytearray:
            return ["bytearray", value.hex()]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, [self.encode(item) for item in value]]
        if kind is dict:
            return ["dict", [[self.encode(k), self.encode(v)] for k, v in value.items()]]
        if kind in values.MADE:
            name = f"{kind.__module__}.{kind.__qualname__}"
            return ["made", name, [self.encode(part) for part in values.MADE[kind](value)]]
        if is_remote(value) and not isinstance(value, BaseException):
            return ["yours", number_of(value)]
        return self._encode_object(value, kind)

    def _encode_object(self, value: Any, kind: type) -> Any:
        if value is os.environ:
            return ["environment"]
        if isinstance(value, types.TracebackType):
            return None
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__, self._lend(value)]
        is_code = isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
        if (is_code or value is Ellipsis or value is NotImplemented) and (name := self.name_of(value)):
            return name
        if isinstance(value, BaseException):
            return self._encode_error(value)
        if values.is_enum_of_python(value):
            return ["member", kind.__module__, kind.__qualname__, value.name]  # type: ignore[attr-defined]
        number = self._lend(value)
        if isinstance(value, type):
            return self._encode_type(value, number)
        content = (
            [self.encode(values.content_of(value))] if values.base_among(kind, values.VALUE_BASES) else []
        )
        return ["object", number, self._encode_kind(kind), *content]

    def _encode_error(self, error: BaseException, depth: int = 0) -> Any:
        if type(number := vars(error).get(NUMBER)) is int:
            return ["yours", number]
        kinds = [
            k for k in type(error).__mro__ if self.name_of(k) or isinstance(k, RemoteType) or self.may_lend(k)
        ]
        kind = next(k for k in kinds if not values.is_of_pytest(k))
        shown = str(error)[:SHOWN_CHARS] if type(error).__str__ is not BaseException.__str__ else None
        plain = {k: v for k, v in vars(error).items() if v is None or type(v) in (int, str, bool)}
        cause = error.__cause__ if depth < MOST_CAUSES else None
        told = [] if cause is None else [self._encode_error(cause, depth + 1)]
        arguments = [self._attempt(part) for part in error.args]
        return ["error", self._number(error), self.encode(kind), arguments, shown, self.encode(plain), told]

    def _attempt(self, value: Any) -> Any:
        try:
            return self.encode(value)
        except TypeError:
            return f"<{type(value).__name__}>"

    def _encode_kind(self, kind: type) -> Any:
        """The type of an object, which is described even where it has a name that both sides know."""
        if isinstance(kind, RemoteType):
            return ["yours", number_of(kind)]
        return self._encode_type(kind, self._number(kind))

    def _encode_type(self, kind: type, number: int) -> Any:
        if number in self.told:
            return ["type", number]
        self.told.add(number)
        return ["type", number, self._described(kind)]

    def _described(self, kind: type) -> dict[str, Any]:
        """Description of a type, for stand-ins: names, the types above, and which methods it has."""
        base = values.base_among(kind, values.VALUE_BASES)
        content = values.base_among(kind, values.CONTAINER_BASES)
        above = [owner for owner in kind.__mro__[1:] if owner is not object]
        owners = [owner for owner in (kind, *above) if owner is not base]
        special = [m for m in values.FORWARDED if any(m in vars(owner) for owner in owners)]
        if content and any(vars(owner).get("__eq__") for owner in owners[: owners.index(content)]):
            content = None
        mine = [b for b in above if not self.name_of(b) or issubclass(b, BaseException)]
        mine = [b for b in mine if self.name_of(b) or isinstance(b, RemoteType) or self.may_lend(b)]
        metas = [k for k in type.mro(type(kind)) if k is not type]
        members = (types.FunctionType, classmethod, staticmethod, property)
        return {
            "name": kind.__qualname__,
            "module": str(kind.__module__),
            "bases": [self.encode(b) for b in mine],
            "special": special,
            "meta": [m for m in values.FORWARDED if any(m in vars(k) for k in metas)],
            "methods": [name for name, value in vars(kind).items() if isinstance(value, members)],
            "value": base.__name__ if base else "",
            "content": content.__name__ if content else "",
            "doc": kind.__doc__ if isinstance(kind.__doc__, str) else "",
        }

    def _lend(self, value: Any) -> int:
        if not self.may_lend(value):
            raise TypeError(f"{type(value).__module__}.{type(value).__name__} is not lent to another process")
        return self._number(value)

    def _number(self, value: Any) -> int:
        number = self.numbers.get(id(value))
        if number is None:
            self.count += 1
            number = self.numbers[id(value)] = self.count
            self.lent[number] = value
        self.times_sent[number] = self.times_sent.get(number, 0) + 1
        return number

    # -- values read

    def decode(self, data: Any, mine: Sequence[Any] = ()) -> Any:
        """The value of what the other side wrote.

        Args:
            mine: containers that this side sent; an answer may say that it holds them.

        Raises:
            LineError: it is nothing that `encode` writes.
        """
        if data is None or type(data) in (bool, int, str):
            return data
        if type(data) is not list or not data or type(data[0]) is not str:
            raise LineError("no value")
        tag, *rest = data
        read = getattr(self, f"_read_{tag}", None) if tag in READ else None
        if read is None:
            raise LineError(f"no value: {tag[:50]}")
        if tag in ("list", "tuple", "set", "frozenset", "dict", "given"):
            return read(mine, *rest)
        return read(*rest)

    def _read_int(self, text: str) -> int:
        return int(text, 16)

    def _read_float(self, text: str) -> float:
        return float.fromhex(text)

    def _read_bytes(self, text: str) -> bytes:
        return bytes.fromhex(text)

    def _read_bytearray(self, text: str) -> bytearray:
        made = bytearray.fromhex(text)
        self.got.append(made)
        return made

    def _read_given(self, mine: Sequence[Any], place: int) -> Any:
        return mine[place]

    def _read_list(self, mine: Sequence[Any], items: list) -> list:
        made: list = []
        self.got.append(made)
        made.extend(self.decode(item, mine) for item in items)
        return made

    def _read_tuple(self, mine: Sequence[Any], items: list) -> tuple:
        return tuple([self.decode(item, mine) for item in items])

    def _read_set(self, mine: Sequence[Any], items: list) -> set:
        made: set = set()
        self.got.append(made)
        made.update(self.decode(item, mine) for item in items)
        return made

    def _read_frozenset(self, mine: Sequence[Any], items: list) -> frozenset:
        return frozenset([self.decode(item, mine) for item in items])

    def _read_dict(self, mine: Sequence[Any], items: list) -> dict:
        made: dict = {}
        self.got.append(made)
        for key, value in items:
            made[self.decode(key, mine)] = self.decode(value, mine)
        return made

    def _read_made(self, name: str, parts: list) -> Any:
        kind = values.MADE_BY_NAME[name]
        place = len(self.got)
        if kind in values.CHANGEABLE:
            self.got.append(None)
        made = values.MAKERS.get(kind, kind)(*(self.decode(part) for part in parts))
        if kind in values.CHANGEABLE:
            self.got[place] = made
        return made

    def _read_environment(self) -> Any:
        return os.environ

    def _read_yours(self, number: int) -> Any:
        return self.lent[number]

    def _read_name(self, module: str, name: str) -> Any:
        return self.named(module, name)

    def _read_member(self, module: str, kind: str, name: str) -> Any:
        return self.named(module, kind)[name]

    def _read_module(self, name: str, number: int) -> Any:
        return self.module(name, number)

    def _read_type(self, number: int, told: Any = None) -> Any:
        if number not in self.types:
            if type(number) is not int or type(told) is not dict:
                raise LineError("a type that was not described")
            above = [self.decode(base) for base in told.get("bases", ())]
            self.types[number] = stand_in(self, number, told, above)
        return self.types[number]

    def _read_error(
        self, number: int, kind: Any, arguments: list, shown: Any, plain: Any, cause: list
    ) -> Any:
        if number in self.held:
            return self.held[number]
        error = self.decode(kind)
        if not (isinstance(error, type) and issubclass(error, BaseException)):
            raise LineError("not an exception")
        parts = [self.decode(part) for part in arguments]
        made = error.__new__(error, *parts)
        if not isinstance(error, RemoteType):
            try:
                made = error(*parts)
            except Exception:
                made.args = tuple(parts)
        else:
            made.args = tuple(parts)
        fields = {k: v for k, v in self.decode(plain).items() if type(k) is str and k[:1] not in ("_", "@")}
        made.__dict__.update({**fields, NUMBER: number})
        if isinstance(error, RemoteType):
            made.__dict__["@shown"] = shown if type(shown) is str else None
            self.held[number] = made
        made.__cause__ = self.decode(cause[0]) if cause else None
        return made

    def _read_object(self, number: int, kind: Any, *content: Any) -> Any:
        local = self.decode(kind)
        if number in self.held:
            self.times_got[number] += 1
            return self.held[number]
        if type(number) is not int or not isinstance(local, RemoteType):
            raise LineError("an object without a type")
        base = values.base_among(local, values.VALUE_BASES)
        value = self.decode(content[0]) if content else None
        if base and type(value) is not base:
            raise LineError("an object whose value is not of its type")
        made = base.__new__(local, value) if base else object.__new__(local)
        fields_of(made)[NUMBER] = number
        with contextlib.suppress(TypeError):  # not of every built-in type there are weak references
            self.held[number] = made
            self.times_got[number] = 1
            weakref.finalize(made, self._let_go, number).atexit = False
        return made

    def _let_go(self, number: int) -> None:
        self.dropped.append([number, self.times_got.pop(number)])


READ = frozenset(name.removeprefix("_read_") for name in vars(Peer) if name.startswith("_read_"))


def _same_pair(a: Any, b: Any) -> bool:
    """Items of dictionaries come as new pairs each time; values of bytearrays are numbers."""
    if type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return type(a) is int and type(b) is int and a == b
