"""Parameters of an algorithm's function, as words of a command line: ``mine.py:torus,cols=2``."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ArgumentError
from ..util.text import brief, quoted

TRUTH = {"true": True, "false": False}
TYPES: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: TRUTH[text.lower()],
    "int": int,
    "float": float,
    "str": str,
}


def described(body: Callable[..., object]) -> str:
    """All of them, for a message: ``cols (int, default 2), rows (needed)``."""
    return ", ".join(f"{one.name} ({_kind(one)})" for one in _after_ranks(body)) or "none"


def arguments(body: Callable[..., object], words: Sequence[str], source: str) -> dict[str, Any]:
    """What words such as ``cols=2`` give, each as its parameter's annotation or default says.

    Args:
        source: of the algorithm, for messages.

    Raises:
        ArgumentError: for a word that is no such thing, or that fits no parameter.
    """
    known = {one.name: one for one in _after_ranks(body)}
    given: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in known or name in given:
            what = "is given twice" if name in given else "is no NAME=VALUE" if not equals else "fits no parameter"
            raise ArgumentError(f"{quoted(source)}: {quoted(word)} {what}; its parameters: {described(body)}")
        given[name] = _value(known[name], text, source)
    return given


def check_all_given(body: Callable[..., object], given: dict[str, Any], path: str, name: str) -> None:
    """Raise ArgumentError if a parameter without default is not among those given, with the words that would do."""
    needed = [one.name for one in _after_ranks(body) if one.default is one.empty]
    missing = [one for one in needed if one not in given]
    if missing:
        words = "".join(f",{one}={given.get(one, 'VALUE')}" for one in needed)
        raise ArgumentError(
            f"{quoted(path)}: missing a required argument: {quoted(missing[0])}; give its parameters: "
            f"{described(body)}, as in {brief(path)}:{name}{words}"
        )


def _after_ranks(body: Callable[..., object]) -> list[inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one for one in list(inspect.signature(body).parameters.values())[1:] if one.kind in named]


def _type(parameter: inspect.Parameter) -> str:
    """The name of its type, by annotation or else default; none if they do not say."""
    said = parameter.annotation
    name = said if isinstance(said, str) else getattr(said, "__name__", "")
    if name not in TYPES and parameter.default is not parameter.empty:
        name = type(parameter.default).__name__
    return name if name in TYPES else ""


def _kind(parameter: inspect.Parameter) -> str:
    default = "needed" if parameter.default is parameter.empty else f"default {quoted(parameter.default)}"
    return ", ".join(filter(None, (_type(parameter), default)))


def _value(parameter: inspect.Parameter, text: str, source: str) -> Any:
    kind = _type(parameter)
    for read in [TYPES[kind]] if kind else [int, float]:
        try:
            return read(text)
        except (ValueError, KeyError):
            continue
    if kind:
        raise ArgumentError(f"{quoted(source)}: {parameter.name}={quoted(text)}: expected {kind} for {parameter.name} "
                            f"({_kind(parameter)}); correct the value")  # fmt: skip
    return text
