"""Frozen dataclasses as command-line flags and as JSON: a field is a flag, its default and its help at once.

    @dataclass(frozen=True)
    class Config:
        gamma: float = 0.99  # discount

is `--gamma 0.99` with the help "discount". Types are int, float, bool, str, a Literal, one of these or none, and tuples
of them (`--hidden 64,64`). Every mistake is one sentence.

A flag takes the word after it, and needs one. One of type bool is a switch: it needs none, and takes the next word only where
that is true or false. `arguments` and `lists` are the two ways in which a flag holds several things.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import cache
from typing import Any, Literal, get_args, get_origin

from shoal.ids import near
from shoal.spec import UserError

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
MOST = 2**63 - 1  # what a tensor and a generator can hold
MOST_SIZE = 2**31 - 1
SPANS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclasses.dataclass(frozen=True)
class Flag:
    """One field of one dataclass."""

    name: str  # as typed, without the dashes: algo.gamma
    type: Any
    default: Any
    help: str

    def parse(self, text: str | None) -> Any:
        """What was typed after it; none where nothing was."""
        if text is not None:
            return parse_value(text, self.type, f"--{self.name}")
        if self.switch:
            return True
        raise UserError(f"--{self.name} was given no value: it takes {self.kind}.")

    def takes(self, word: str) -> bool:
        """Whether a word that follows it is its value."""
        if not self.switch:
            return True
        try:
            self.parse(word)
        except UserError:
            return False
        return True

    @property
    def switch(self) -> bool:
        return bool in (self.type, *get_args(self.type))

    @property
    def kind(self) -> str:
        return describe(self.type)


def flags_of(cls: Any, prefix: str = "") -> dict[str, Flag]:
    """The flags of a dataclass, by the name typed: of all fields but those with the metadata `{"flag": False}`."""
    hints, helps = typing.get_type_hints(cls), helps_of(cls)
    out = {}
    for f in (f for f in dataclasses.fields(cls) if f.metadata.get("flag", True)):
        name = prefix + f.name.replace("_", "-")
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[operator]
        out[name] = Flag(name, hints[f.name], default, helps.get(f.name, ""))
    return out


@cache
def helps_of(cls: Any) -> dict[str, str]:
    """The trailing comment of each field, in the class and in those it derives from."""
    helps: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(base):
            for match in re.finditer(r"^\s+(\w+)\s*:[^#\n]*(?:\(\n[^#\n]*)?#\s*(.+)$", inspect.getsource(base), re.MULTILINE):
                helps[match[1]] = match[2].strip()  # a formatter may have put a long line's end into brackets
    return helps


def describe(kind: Any) -> str:
    """A type as help shows it."""
    if get_origin(kind) is Literal:
        return "|".join(str(a) for a in get_args(kind))
    if get_origin(kind) in (typing.Union, types.UnionType):
        return "|".join("none" if a is type(None) else describe(a) for a in get_args(kind))
    if get_origin(kind) is tuple:
        return f"{describe(get_args(kind)[0])},..."
    return getattr(kind, "__name__", str(kind))


def parse_value(text: str, kind: Any, where: str) -> Any:
    """A word typed by a user -> a value of the field's type."""
    origin, args = get_origin(kind), get_args(kind)
    word, shown = text.strip(), f"{text!r:.60}"
    if origin is Literal:
        if word in args:
            return word
        raise UserError(f"{where} is {shown}{near(word, args)}: it takes {', '.join(map(str, args))}.")
    if origin in (typing.Union, types.UnionType):
        if type(None) in args and word.lower() == "none":
            return None
        for a in args:
            if a is not type(None):
                try:
                    return parse_value(text, a, where)
                except UserError as e:
                    problem = e
        raise (
            problem if len(args) == 2 and type(None) in args else UserError(f"{where} is {shown}: it takes {describe(kind)}.")
        )
    if origin is tuple:
        inner = args[0]
        return tuple(parse_value(w, inner, where) for w in word.split(",") if w.strip())
    if kind is bool:
        if word.lower() in ("true", "yes", "on", "1"):
            return True
        if word.lower() in ("false", "no", "off", "0"):
            return False
        raise UserError(f"{where} is {shown}: it takes true or false.")
    if "\0" in text:
        raise UserError(f"{where} is {shown}: there is no such character in a name.")
    if kind is int:
        match = re.fullmatch(r"([+-]?\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)([kKmMgG]?)", word)
        number = Decimal(match[1].replace("_", "")) * UNITS.get(match[2].lower(), 1) if match else Decimal("0.5")
        if number != number.to_integral_value():
            raise UserError(f"{where} is {shown}: it takes a whole number, such as 1000, 1_000, 1e6 or 2M.")
        return _held(int(number), where)
    if kind is float:
        try:
            return float(word)
        except ValueError:
            raise UserError(f"{where} is {shown}: it takes a number.") from None
    return text


def _held(number: int, where: str) -> int:
    if not -MOST <= number <= MOST:
        raise UserError(f"{where} is about {Decimal(number):.1e}: there is no room for a number beyond {Decimal(MOST):.1e}.")
    return number


def refuse_huge(size: int, flag: str) -> None:
    """Of a number of things that memory is taken for: more than any machine has room for."""
    if size > MOST_SIZE:
        raise UserError(f"{flag} is {size}: there is not enough memory for so many.")


def parse_span(text: str | float | None, where: str) -> float | None:
    """A length of time, 90 or 90s or 5m or 2h, in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"([\d.]+)\s*([smhd]?)", str(text).strip())
    try:
        seconds = float(match[1]) * SPANS.get(match[2], 1.0) if match else 0.0
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise UserError(f"{where} is {text!r}: it takes a length of time, such as 90s, 5m or 2h.")
    return seconds


def build(cls: Any, values: dict[str, Any], where: str) -> Any:
    """A dataclass from plain values (of JSON, or of Python keywords); unknown keys are errors."""
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints or key not in {f.name for f in dataclasses.fields(cls)}:
            names = [f.name for f in dataclasses.fields(cls)]
            close = near(key, names)
            raise UserError(f"{where} has no setting {key!r}{close or '; it has ' + (', '.join(names) or 'none')}.")
    return cls(**{k: _fit(v, hints[k], f"{where}.{k}" if where else k) for k, v in values.items()})


def _fit(value: Any, kind: Any, where: str) -> Any:
    """A value from JSON or Python, checked against the field's type; lists become tuples, whole floats ints."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if isinstance(value, str):
            return parse_value(value, kind, where)
        if value is None and type(None) in args:
            return None
        for k in args:
            try:
                return _fit(value, k, where)
            except UserError:
                continue
        raise UserError(f"{where} is {value!r}: it takes {describe(kind)}.")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_fit(v, args[0], where) for v in value)
    if origin is dict or kind is Any:
        return value
    if isinstance(value, str):
        return parse_value(value, kind, where)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value if isinstance(value, float) else _held(value, where))
    if (
        kind is int
        and not isinstance(value, bool)
        and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ):
        return _held(int(value), where)
    if kind is bool and isinstance(value, bool):
        return value
    raise UserError(f"{where} is {value!r}: it takes {describe(kind)}.")


def split(
    argv: Iterable[str], takes: Callable[[str, str], bool] = lambda name, word: True
) -> tuple[list[str], dict[str, str | None]]:
    """Words and flags: `a --x 1 --y=2 --z` -> [a], {x: 1, y: 2, z: none}. `takes(name, word)`: whether a word that follows a
    flag is its value."""
    words: list[str] = []
    flags: dict[str, str | None] = {}
    items = list(argv)
    i = 0
    while i < len(items):
        item = items[i]
        i += 1
        if not item.startswith("--"):
            words.append(item)
            continue
        name, eq, value = item[2:].partition("=")
        name = name.replace("_", "-")
        if eq:
            flags[name] = value
            continue
        follows = i < len(items) and not items[i].startswith("--") and takes(name, items[i])
        flags[name] = items[i] if follows else None
        i += follows
    return words, flags


# --- flags that hold several things ----------------------------------------------------------------------------------

WORDS = {"true": True, "false": False, "none": None}


def arguments(text: str, flag: str, whole: str | None = None, example: str = "") -> dict[str, Any]:
    """`n_walkers=4,shape=(2,3),mode=fast`: names and values, as Python would read them; other values are text. Where they stand
    behind the name of what takes them, in the `whole` that a flag was given, as in the `example`, text is in quotes."""
    given = f"{flag} is {(text if whole is None else whole)!r}"
    form = "it takes name=value,name=value" if whole is None else f"arguments are name=number, as in {example}"
    parts = _parts(text, given, form)
    out = {name: _value(word) for name, word in parts.items()}
    if whole is not None and any(out[name] is word for name, word in parts.items()):
        raise UserError(f"{given}: {form}.")
    return out


def lists(text: str, flag: str) -> dict[str, tuple[str, ...]]:
    """`walkers=walker_0+walker_1,rest=walker_2`: names, and the names that each stands for."""
    form = "it takes name=one+two,name=three"
    parts = _parts(text, f"{flag} is {text!r}", form)
    out = {name: tuple(w.strip() for w in value.split("+") if w.strip()) for name, value in parts.items()}
    for name, words in out.items():
        if not words:
            raise UserError(f"{flag} is {text!r}: {name!r} stands for nothing; {form}.")
    return out


def refuse_unknown(names: Iterable[str], function: Callable[..., Any], given: str, but: tuple[str, ...] = ()) -> None:
    """Refuse arguments that a function does not take by name, or `but` from others. Of one that does not say what it takes
    nothing is known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in but]
    for name in names:
        if name not in known and not any(p.kind == p.VAR_KEYWORD for p in parameters):
            takes = f"takes no {name!r}{near(name, known)}: it takes {', '.join(known) or 'none'}"
            raise UserError(f"{given}, and {getattr(function, '__name__', 'it')} {takes}.")


def _value(word: str) -> Any:
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    try:
        return ast.literal_eval(word)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return word


def _parts(text: str, given: str, form: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for word in _split(text):
        name, eq, value = (w.strip() for w in word.partition("="))
        if not eq or not re.fullmatch(r"[^\s=+,]+", name):
            raise UserError(f"{given}: {form}.")
        if name in parts:
            raise UserError(f"{given}: it has {name!r} twice.")
        parts[name] = value
    return parts


def _split(text: str) -> list[str]:
    """At the commas that are outside brackets and quotes."""
    words, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        depth += not quote and ((c in "([{") - (c in ")]}"))
        if c == "," and not depth and not quote:
            words.append("")
        else:
            words[-1] += c
    return [w for w in words if w.strip()]
