import enum
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from silverspoon_kd.cli.schema import Place, Text, build, convert
from silverspoon_kd.errors import ConfigurationError

HERE = Place("run.yaml", ("key",))


class Colour(enum.Enum):
    NO = "no"
    RED = "red"


@dataclass(frozen=True)
class Inner:
    size: int
    name: str = "x"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    source: str | Inner = "s"
    many: list[Inner] = field(default_factory=list)


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        (3, int, 3),
        ("1e3", int, 1000),
        (Text("3"), int, 3),
        (3, float, 3.0),
        ("1e-4", float, 1e-4),  # YAML 1.1 reads this as text
        (Text("5e-4"), float, 5e-4),
        (True, bool, True),
        (Text("false"), bool, False),
        (Text("on"), bool, True),
        (Text("007"), str, "007"),
        (Text("3"), str, "3"),
        ("text", str, "text"),
        (None, float | None, None),
        (Text("null"), float | None, None),
        (Text("0.5"), float | None, 0.5),
        (True, str | bool, True),
        ("all", str | bool, "all"),
        (Text("all"), str | bool, "all"),
        (Text("true"), str | bool, True),
        (False, Colour | str, "no"),  # a bare `no`
        (Text("no"), Colour | str, "no"),
        ("red", Colour | str, "red"),
        (["a", "b"], list[str], ["a", "b"]),
        (Text("[a, b]"), list[str], ["a", "b"]),
        (Text("[0, 3]"), int | list[int] | None, [0, 3]),
        (Text("4"), int | list[int] | None, 4),
        ({"a": 1}, dict[str, Any] | str | None, {"a": 1}),
        (Text('{"a": 1}'), dict[str, Any] | str | None, {"a": 1}),
        (Text("config.json"), dict[str, Any] | str | None, "config.json"),
        (Text("x y"), str | list[str] | dict[str, str], "x y"),
        ("b", Literal["a", "b"], "b"),
        (Text("b"), Literal["a", "b"] | None, "b"),
        (Text("[1, {a: 2}]"), Any, [1, {"a": 2}]),
    ],
)
def test_values_become_what_the_type_says(value, hint, wanted):
    result = convert(value, hint, HERE)
    assert result == wanted
    assert type(result) is type(wanted)


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        ("abc", int, "is 'abc', but a whole number is needed"),
        (2.5, int, "is 2.5, but a whole number is needed"),
        (True, int, "is True, but a whole number is needed"),
        (Text("abc"), float, "is 'abc', but a number is needed"),
        ("maybe", bool, "is 'maybe', but true or false is needed"),
        (5, str, "is 5, but text (put it in quotes) is needed"),
        (Text("x"), list[int], "is 'x', but a list is needed"),
        (["a"], list[int], "key.0 is 'a', but a whole number is needed"),
        ("x", dict[str, int], "is 'x', but a mapping of keys to values is needed"),
        ("rad", Colour | str, "is 'rad', which is unknown. Did you mean 'red'? Known are: no, red."),
        ("even", Literal["evn", "first"], "is 'even', which is unknown. Did you mean 'evn'? Known are: evn, first."),
        (Text("x"), int | list[int], "is 'x', but a whole number or a list is needed"),
        ({1: 2}, dict[str, int], "has the key 1, which is no text"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_place_and_value(value, hint, wanted):
    with pytest.raises(ConfigurationError) as caught:
        convert(value, hint, HERE)
    assert str(caught.value).startswith("run.yaml: key")
    assert wanted in str(caught.value)


def test_dataclasses_nest():
    built = build(Outer, {"inner": {"size": 1}, "source": {"size": 2}, "many": [{"size": 3, "name": "y"}]}, Place("f"))
    assert built == Outer(Inner(1), Inner(2), [Inner(3, "y")])


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"inner": {"size": 1, "nam": "x"}}, "f: inner.nam is an unknown key. Did you mean 'name'?"),
        ({"inner": {}}, "f: inner.size is missing"),
        ({"inner": {"size": 1}, "source": {"size": "x"}}, "f: source.size is 'x'"),
        ({"inner": {"size": 1}, "many": [{"size": 1}, {"sise": 1}]}, "f: many.1.sise is an unknown key"),
        ({"inner": None}, "f: inner is None, but a mapping"),
    ],
)
def test_unknown_and_missing_keys_are_named_with_their_path(values, wanted):
    with pytest.raises(ConfigurationError) as caught:
        build(Outer, values, Place("f"))
    assert wanted in str(caught.value)


def test_a_value_from_the_command_line_is_named_as_an_option():
    place = Place("f", overridden=frozenset({"inner.size"}))
    with pytest.raises(ConfigurationError, match=r"^--inner.size is 'x'"):
        build(Outer, {"inner": {"size": Text("x")}}, place)
