"""JSON in and out for the package's value types.

Every document of ours is one JSON object with a ``format`` and a ``version``
key in front. Fractions travel as ``"p/q"`` strings, so nothing is lost.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from ..errors import BlinkError, FormatError
from .text import DIGITS, brief, controls, quoted

T = TypeVar("T")
FRACTION = re.compile(rf"-?[0-9]{{1,{DIGITS}}}(/0*[1-9][0-9]{{0,{DIGITS}}})?")
MOST_VALUES = 1 << 20  # in a document, nested ones too
# What may be a number that nothing has, or a control character: as JSON writes them, and some texts besides
SUSPECT = re.compile(rb"[0-9]{19}|\\[bfnrtu]|\x7f|\xc2[\x80-\x9f]")


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the frozen value types: topology, packing, plan, program."""


def _enc(obj: Any) -> Any:
    if isinstance(obj, Fraction):
        return str(obj)
    raise TypeError(f"{type(obj).__name__} has no JSON form")


def _dec(kind: type, obj: Any) -> Any:
    if kind is Fraction:
        if isinstance(obj, int) or (isinstance(obj, str) and FRACTION.fullmatch(obj)):
            return Fraction(obj)
        raise ValueError(f'expected a fraction such as "3/2", got {quoted(obj)}')
    raise TypeError(f"{kind} has no JSON form")


def values_in(text: str | bytes) -> int:
    """How many values a JSON text has, or a few more, as strings have commas and brackets, too."""
    plain = text.encode(errors="replace") if isinstance(text, str) else text
    return sum(map(plain.count, (b",", b"[", b"{")))


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
        """Read what :meth:`to_json` wrote. What needs more than the document to be checked is checked by callers.

        Args:
            source: where the text came from, for the error message.

        Raises:
            FormatError: for what is no such document.
            BlinkError: for one that is not consistent in itself; the kind of error is its own.
        """
        found = values_in(text)
        if found > MOST_VALUES and found > (most := cls.most_values(text)):
            raise FormatError(f"{source or cls.KIND}: not a valid {cls.KIND}: {found} values; at most {most} are read, "
                              "give a smaller one")  # fmt: skip
        value = loads(text, cls, kind=cls.KIND, version=cls.VERSION, source=source or cls.KIND)
        try:
            return value._consistent()
        except BlinkError as error:
            raise type(error)(f"{source or cls.KIND}: {brief(str(error))}") from error

    @classmethod
    def most_values(cls, text: str | bytes) -> int:
        """How many values a document that has many may have."""
        return MOST_VALUES

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
        head = msgspec.json.decode(text, type=_Head)
        if (head.format, head.version) != (f"blinkmpi.{kind}", version):
            ours = head.format == f"blinkmpi.{kind}"
            raise FormatError(
                f"{source}: expected format 'blinkmpi.{kind}' version {version}, got format {quoted(head.format)} "
                f"version {quoted(head.version)}; "
                f"{'write it again with this version of blinkmpi' if ours else 'give another file'}"
            )
        read: Any = msgspec.json.decode(text, type=_with_head(cls), dec_hook=_dec)  # type: ignore[arg-type]
    except RecursionError as error:
        raise FormatError(f"{source}: not a valid {kind}: nested too deeply; write it again") from error
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError) as error:
        raise FormatError(f"{source}: not a valid {kind}: {brief(str(error))}; correct that field") from error
    if SUSPECT.search(text.encode() if isinstance(text, str) else text):
        for where, leaf in _leaves(plain(read), "$"):
            if isinstance(leaf, int) and not -(1 << 63) <= leaf < 1 << 63:
                wrong = f"{quoted(leaf)} is no number of anything"
            elif isinstance(leaf, str) and controls(leaf):
                wrong = f"{quoted(leaf)} has a control character"
            else:
                continue
            raise FormatError(f"{source}: not a valid {kind}: {brief(where)}: {wrong}; correct that field")
    return cls(**{name: getattr(read, name) for name in cls.__struct_fields__})  # type: ignore[attr-defined]


class _Head(msgspec.Struct):
    """What every document begins with; the rest is not looked at."""

    format: Any = None
    version: Any = None


@cache
def _with_head(cls: type[Value]) -> type:
    """The same fields as ``cls`` beside those of the head, to read a document in one go, without dicts between."""
    fields = [(f.name, f.type, _default(f)) for f in msgspec.structs.fields(cls)]
    head = [(name, Any, None) for name in _Head.__struct_fields__]
    return msgspec.defstruct(cls.__name__, [*fields, *head], forbid_unknown_fields=True, kw_only=True)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    factory = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else msgspec.field(default_factory=factory)


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """All texts, names and numbers of a plain value, with their JSON paths."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{where}.{key}", key
            yield from _leaves(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{where}[{i}]")
    else:
        yield where, value
