"""JSON in and out for the package's value types.

Every document of ours is one JSON object with a ``format`` and a ``version``
key in front. Fractions travel as ``"p/q"`` strings, so nothing is lost.
"""

from fractions import Fraction
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from ..errors import FormatError

T = TypeVar("T")


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the frozen value types: topology, packing, plan, program."""


def _enc(obj: Any) -> Any:
    if isinstance(obj, Fraction):
        return str(obj)
    raise TypeError(f"{type(obj).__name__} has no JSON form")


def _dec(kind: type, obj: Any) -> Any:
    if kind is Fraction:
        if not isinstance(obj, str | int):
            raise ValueError(f'expected a fraction such as "3/2", got {obj!r}')
        try:
            return Fraction(obj)
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(f'expected a fraction such as "3/2", got {obj!r}') from error
    raise TypeError(f"{kind} has no JSON form")


def plain(value: Any) -> Any:
    """Turn a value into dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value, enc_hook=_enc)


def dumps(value: Value, *, kind: str, version: int) -> str:
    """Write ``value`` as one JSON document with ``format`` and ``version`` in front."""
    body = {"format": f"blinkmpi.{kind}", "version": version, **plain(value)}
    return msgspec.json.format(msgspec.json.encode(body), indent=1).decode() + "\n"


class Document(Value, frozen=True):
    """A value that is kept in a file of its own: one JSON document of a kind, in a version of its format."""

    KIND: ClassVar[str]
    VERSION: ClassVar[int]

    def to_json(self) -> str:
        """The portable file."""
        return dumps(self, kind=self.KIND, version=self.VERSION)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "") -> Self:
        """Read what :meth:`to_json` wrote; FormatError otherwise. What needs more to be checked is checked by callers.

        Args:
            source: where the text came from, for the error message.
        """
        return loads(text, cls, kind=cls.KIND, version=cls.VERSION, source=source or cls.KIND)._consistent()

    def _consistent(self) -> Self:
        """Return self if it is consistent in itself."""
        return self


def loads(text: str | bytes, cls: type[T], *, kind: str, version: int, source: str = "text") -> T:
    """Read a document that :func:`dumps` wrote.

    Args:
        source: where the text came from, for the error message.

    Raises:
        FormatError: naming the source and the JSON path of the wrong field.
    """
    try:
        body = msgspec.json.decode(text)
        if not isinstance(body, dict):
            raise FormatError(f"{source}: expected a JSON object with a 'format' key, got {type(body).__name__}")
        got = (body.pop("format", None), body.pop("version", None))
        if got != (f"blinkmpi.{kind}", version):
            raise FormatError(
                f"{source}: expected format 'blinkmpi.{kind}' version {version}, got format {got[0]!r} "
                f"version {got[1]!r}; write it again with this version of blinkmpi"
            )
        return msgspec.convert(body, cls, dec_hook=_dec)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{source}: not a valid {kind}: {error}; correct that field") from error
