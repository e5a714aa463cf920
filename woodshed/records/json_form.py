"""Records to JSON values and back."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")


_AS_IT_IS = frozenset((str, int, float, bool, type(None)))


def to_json(record: Any) -> dict[str, Any]:
    """A record as JSON-ready values (tuples become lists, paths become strings)."""

    def plain(value: Any) -> Any:
        if type(value) in _AS_IT_IS:  # most values by far: ids and log-probs
            return value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return plain(record)


def from_json(kind: type[R], data: Any) -> R:
    """The record that `to_json` wrote.

    Raises:
        ValueError: a field is unknown, missing or of another kind (a run of another version, or a damaged one).
    """
    return _reader(kind)(data)


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Converter from JSON values to `kind`; made once per type, since a run holds hundreds of thousands of records."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record_reader(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1] is Ellipsis:
        item = _reader(arguments[0])
        return tuple if item is _as_it_is else lambda data: tuple(map(item, data))
    if origin is tuple:
        items = [_reader(argument) for argument in arguments]
        return lambda data: tuple(read(value) for read, value in zip(items, data, strict=True))
    if origin is dict:
        item = _reader(arguments[1])
        return _as_it_is if item is _as_it_is else lambda data: {k: item(value) for k, value in data.items()}
    if origin in (typing.Union, types.UnionType):
        inner = _reader(next(a for a in arguments if a is not type(None)))
        return _as_it_is if inner is _as_it_is else lambda data: None if data is None else inner(data)
    return Path if kind is Path else _as_it_is


def _record_reader(kind: type) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    readers = {name: reader for name in hints if (reader := _reader(hints[name])) is not _as_it_is}
    plain = {name: kinds for name in hints if (kinds := _plain(hints[name]))}

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError(f"{kind.__name__} is {str(data)[:80]!r}, not a table of its fields")
        if unknown := set(data) - set(hints):
            raise ValueError(f"{kind.__name__} has no field {sorted(unknown)[0]!r}")
        for name in plain.keys() & data:
            if not isinstance(data[name], plain[name]):
                raise ValueError(f"{kind.__name__}.{name} is {str(data[name])[:80]!r}")
        values = dict(data)
        try:
            for name in readers.keys() & data:
                values[name] = readers[name](data[name])
            return kind(**values)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{kind.__name__}: {error}") from error

    return read


def _plain(hint: Any) -> tuple[type, ...]:
    """Types that a number or text in JSON converts to; () for others. Elements of lists of tokens are not checked."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if not all(kind in (int, float, str, bool, type(None)) for kind in kinds):
        return ()
    return (*kinds, int) if float in kinds else kinds


def _as_it_is(data: Any) -> Any:
    return data
