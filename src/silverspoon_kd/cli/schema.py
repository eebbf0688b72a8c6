"""From the values of a YAML file or a command line to frozen dataclasses, by their type hints."""

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import yaml

from silverspoon_kd.errors import ConfigurationError, near_names

Built = TypeVar("Built")

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Text:
    """A value as it was typed on a command line; what it means depends on the field that it is for."""

    text: str


@dataclass(frozen=True)
class Place:
    """Where a value stands, for messages.

    Attributes:
        file: the YAML file.
        path: the keys from the top to the value.
        overridden: the dotted paths that the command line sets.
    """

    file: str
    path: tuple[str, ...] = ()
    overridden: frozenset[str] = field(default_factory=frozenset)

    def key(self, name: object) -> "Place":
        """Return the place of one entry of this mapping or list."""
        return dataclasses.replace(self, path=(*self.path, str(name)))

    def __str__(self) -> str:
        dotted = ".".join(self.path)
        if any(".".join(self.path[: i + 1]) in self.overridden for i in range(len(self.path))):
            return f"--{dotted}"
        return f"{self.file}: {dotted}" if dotted else self.file


def build(cls: type[Built], values: object, place: Place) -> Built:
    """Return ``cls`` made of a mapping, each value checked against the field's type.

    Raises:
        ConfigurationError: a key is unknown or missing, or a value does not fit its field.
    """
    fields = {item.name: item for item in dataclasses.fields(cls) if item.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    checked = {}
    for name, value in entries(values, place).items():
        if name not in fields:
            refuse_unknown(name, fields, place)
        checked[name] = convert(value, hints[name], place.key(name))
    for name, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and name not in checked:
            raise ConfigurationError(f"{place.key(name)} is missing. Add the key {name!r}.")
    try:
        return cls(**checked)
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}" if place.path else f"{place.file}: {error}") from error


def entries(values: object, place: Place) -> dict[str, Any]:
    """Return the entries of a mapping.

    Raises:
        ConfigurationError: ``values`` is no mapping, or a key is no text.
    """
    values = _parsed(values)
    if not isinstance(values, Mapping):
        _refuse(values, "a mapping of keys to values", place)
    for name in values:
        if not isinstance(name, str):
            raise ConfigurationError(f"{place} has the key {name!r}, which is no text. Put it in quotes.")
    return dict(values)


def refuse_unknown(name: str, known: typing.Iterable[str], place: Place) -> NoReturn:
    """Raise the error for a key that does not exist."""
    names = sorted(known)
    shown = f"Known keys: {', '.join(names)}." if len(names) <= 20 else f"There are {len(names)} known keys."
    raise ConfigurationError(f"{place.key(name)} is an unknown key.{near_names(name, names)} {shown}")


def convert(value: object, hint: Any, place: Place) -> Any:
    """Return the value as the type asks for it.

    Raises:
        ConfigurationError: it does not fit.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return _parsed(value)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments, place)
    if origin is typing.Literal:
        return _convert_literal(value, arguments, place)
    if origin in (list, tuple):
        return _convert_sequence(value, origin, arguments, place)
    if hint is dict or origin in (dict, Mapping):
        return _convert_mapping(value, arguments, place)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, place)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _convert_enum(value, hint, place)
    return _convert_scalar(value, hint, place)


def _parsed(value: object) -> Any:
    if not isinstance(value, Text):
        return value
    try:
        return yaml.safe_load(value.text)
    except yaml.YAMLError:
        return value.text


def _refuse(value: object, wanted: str, place: Place) -> NoReturn:
    shown = value.text if isinstance(value, Text) else value
    raise ConfigurationError(f"{place} is {shown!r}, but {wanted} is needed.")


def _refuse_choice(value: object, allowed: typing.Iterable[object], place: Place) -> NoReturn:
    known = [str(each) for each in allowed]
    near = near_names(str(value), known)
    raise ConfigurationError(f"{place} is {value!r}, which is unknown.{near} Known are: {', '.join(known)}.")


def _convert_union(value: object, hints: tuple[Any, ...], place: Place) -> Any:
    parsed = _parsed(value)
    if parsed is None and type(None) in hints:
        return None
    choices = [hint for hint in hints if hint is not type(None)]
    enums = [hint for hint in choices if isinstance(hint, type) and issubclass(hint, enum.Enum)]
    if enums:
        return _convert_enum(value, enums[0], place)
    for hint in choices:
        # A value that is of one of the types already means that one: `true` for `str | bool` is no text.
        if isinstance(hint, type) and type(parsed) is hint and not (hint is str and isinstance(value, Text)):
            return parsed
    errors = []
    # Text last, since everything typed on a command line can be read as text.
    for hint in sorted(choices, key=lambda each: each is str):
        try:
            return convert(value, hint, place)
        except ConfigurationError as error:
            errors.append((hint, error))
    dataclass_errors = [error for hint, error in errors if dataclasses.is_dataclass(hint)]
    if isinstance(parsed, Mapping) and dataclass_errors:
        raise dataclass_errors[0]
    if len(errors) == 1:
        raise errors[0][1]
    _refuse(value, " or ".join(_describe(hint) for hint in choices), place)


def _convert_literal(value: object, allowed: tuple[Any, ...], place: Place) -> Any:
    parsed = value.text if isinstance(value, Text) and value.text in allowed else _parsed(value)
    if not any(parsed == each and type(parsed) is type(each) for each in allowed):
        _refuse_choice(parsed, allowed, place)
    return parsed


def _convert_enum(value: object, hint: type[enum.Enum], place: Place) -> str:
    if isinstance(value, hint):
        return str(value.value)
    known = [str(each.value) for each in hint]
    # YAML reads a bare `no` as false.
    text = "no" if value is False else value.text if isinstance(value, Text) else value
    if text not in known:
        _refuse_choice(text, known, place)
    return str(text)


def _convert_sequence(value: object, origin: type, arguments: tuple[Any, ...], place: Place) -> Any:
    parsed = _parsed(value)
    if not isinstance(parsed, list | tuple):
        _refuse(value, "a list", place)
    hint = arguments[0] if arguments else Any
    return origin(convert(each, hint, place.key(number)) for number, each in enumerate(parsed))


def _convert_mapping(value: object, arguments: tuple[Any, ...], place: Place) -> dict[str, Any]:
    hint = arguments[1] if len(arguments) == 2 else Any
    return {name: convert(each, hint, place.key(name)) for name, each in entries(value, place).items()}


def _convert_scalar(value: object, hint: Any, place: Place) -> Any:
    text = value.text if isinstance(value, Text) else value
    if hint is str:
        return text if isinstance(text, str) else _refuse(value, "text (put it in quotes)", place)
    if hint is bool:
        word = str(text).lower()
        return word in _TRUE if word in _TRUE + _FALSE else _refuse(value, "true or false", place)
    if hint in (int, float):
        return _convert_number(value, hint, place)
    return _parsed(value)


def _convert_number(value: object, hint: type, place: Place) -> int | float:
    wanted = _describe(hint)
    text = value.text if isinstance(value, Text) else value
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        _refuse(value, wanted, place)
    try:
        # YAML 1.1 reads 1e-4 as text.
        number = float(text)
    except ValueError:
        _refuse(value, wanted, place)
    if hint is float:
        return number
    if not number.is_integer():
        _refuse(value, wanted, place)
    return int(text) if isinstance(text, int) else int(number)


def _describe(hint: Any) -> str:
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if hint in names:
        return names[hint]
    origin = typing.get_origin(hint) or hint
    if origin in (list, tuple):
        return "a list"
    if origin in (dict, Mapping) or dataclasses.is_dataclass(hint):
        return "a mapping"
    return str(hint)
