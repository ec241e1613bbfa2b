"""Reads the fields of a JSON body one by one, with errors that name the field as the client wrote it."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from graftline.errors import InvalidRequestError


class Fields:
    """The fields of a JSON object. Each may be read once; `refuse_rest` complains about the others.

    Args:
        within: what stands before a field's name in errors: `stream_options.`.
    """

    def __init__(self, content: Mapping[str, Any], within: str = "") -> None:
        self._within = within
        # Null means "not given" everywhere in this interface.
        self._left = {name: value for name, value in content.items() if value is not None}

    @classmethod
    def of_body(cls, body: bytes) -> "Fields":
        """Parses a request body.

        Raises:
            InvalidRequestError: it is not a JSON object.
        """
        try:
            content = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError("body", f"is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise InvalidRequestError("body", "is not a JSON object")
        return cls(content)

    def take(self, name: str) -> Any:
        """The raw value, None when not given."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(self._within + name, f"{_shown(value)} is not a string")
        return value

    def flag(self, name: str) -> bool:
        """A boolean, false when not given."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequestError(self._within + name, f"{_shown(value)} is not a boolean")
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer that the wire can carry; the rules for its value are the router's."""
        value = self.take(name)
        return None if value is None else integer(value, self._within + name, low, high)

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.take(name)
        return None if value is None else number(value, self._within + name)

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Fields that this server does not implement; false and empty values ask for nothing.

        Raises:
            InvalidRequestError: one of them asks for something.
        """
        for name in names:
            value = self.take(name)
            if value not in (None, False, [], {}, "", 0):
                raise InvalidRequestError(self._within + name, why)

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that do not change what is generated."""
        for name in names:
            self.take(name)

    def refuse_rest(self) -> None:
        """Raises InvalidRequestError for a field nobody knows that asks for something."""
        self.refuse(list(self._left), "this server does not know the field")


def integer(value: Any, name: str, low: int, high: int) -> int:
    """Checks an integer of a JSON body."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(name, f"{_shown(value)} is not an integer")
    if not low <= value <= high:
        raise InvalidRequestError(name, f"{_shown(value)} is not in [{low}, {high}]")
    return value


def number(value: Any, name: str) -> float:
    """Checks a number of a JSON body."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(name, f"{_shown(value)} is not a number")
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf
    if not math.isfinite(as_float):
        raise InvalidRequestError(name, f"{_shown(value)} is not finite")
    return as_float


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
