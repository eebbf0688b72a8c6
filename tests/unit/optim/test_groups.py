import logging

import pytest
import torch
from torch import nn

from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.optim import GroupSpec, build_parameter_groups


def _block(prefix: str, size: int = 3) -> tuple[nn.Module, list[tuple[str, nn.Parameter]]]:
    module = nn.Linear(size, size)
    return module, [(f"{prefix}.{name}", parameter) for name, parameter in module.named_parameters()]


def _build(owned, specs=None, **overrides):
    arguments = {"learning_rate": 1e-3, "weight_decay": 0.1, "decay_names": set()} | overrides
    return build_parameter_groups(owned, specs or {}, **arguments)


def test_groups_carry_own_values_and_those_of_the_run():
    first, second = _block("a"), _block("b")
    groups = _build(
        {"student": first[1], "block": second[1]},
        {"block": GroupSpec("block", learning_rate=1e-4, weight_decay=0.5)},
        decay_names={"a.weight", "b.weight"},
    )
    table = [(g["alignment"], g["lr"], g["weight_decay"], g["decay"], g["projector"]) for g in groups]
    assert table == [
        ("student", 1e-3, 0.1, True, False),
        ("student", 1e-3, 0.0, False, False),
        ("block", 1e-4, 0.5, True, False),
        ("block", 1e-4, 0.0, False, False),
    ]
    assert [id(p) for g in groups for p in g["params"]] == [
        id(p) for p in (first[0].weight, first[0].bias, second[0].weight, second[0].bias)
    ]


def test_projectors_have_groups_of_their_own():
    block, projector = _block("layer"), _block("projector")
    groups = _build(
        {"block": block[1] + projector[1]},
        decay_names={"layer.weight", "projector.weight"},
        projector_names={"projector.weight", "projector.bias"},
    )
    assert [(g["decay"], g["projector"], len(g["params"])) for g in groups] == [
        (True, False, 1),
        (False, False, 1),
        (True, True, 1),
        (False, True, 1),
    ]
    assert groups[2]["params"][0] is projector[0].weight


def test_rate_zero_is_a_value_and_not_a_missing_one():
    groups = _build({"block": _block("b")[1]}, {"block": GroupSpec("block", learning_rate=0.0, weight_decay=0.0)})
    assert {(g["lr"], g["weight_decay"]) for g in groups} == {(0.0, 0.0)}


def test_g_14_frozen_and_parameter_free_modules_get_no_group_and_one_warning(caplog):
    frozen, live = _block("frozen"), _block("live")
    frozen[0].requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        groups = _build({"student": [], "activation": [], "frozen": frozen[1], "live": live[1]})
    assert {g["alignment"] for g in groups} == {"live"}
    [record] = caplog.records
    assert "'activation', 'frozen'" in record.getMessage()
    torch.optim.AdamW(groups)


def test_g_14_nested_matches_are_refused():
    outer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    owned = {
        "layer": [(f"layer.{n}", p) for n, p in outer.named_parameters()],
        "layer.1": [(f"layer.1.{n}", p) for n, p in outer[1].named_parameters()],
    }
    with pytest.raises(ConfigurationError, match=r"'layer\.1\.weight' belongs to 'layer' and to 'layer\.1'"):
        _build(owned)


def test_tied_weight_of_one_owner_counts_once():
    module, pairs = _block("a")
    [group] = _build({"student": [*pairs, ("tied", module.weight)]})
    assert len(group["params"]) == 2


@pytest.mark.parametrize("field", ["learning_rate", "weight_decay", "max_grad_norm"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), "1e-4", True])
def test_numbers_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ConfigurationError, match=f"alignment 'x': {field}="):
        GroupSpec("x", **{field: value})


@pytest.mark.parametrize("overrides", [{"learning_rate": -1.0}, {"weight_decay": float("nan")}])
def test_numbers_of_the_run_are_checked_too(overrides):
    with pytest.raises(ConfigurationError, match=next(iter(overrides))):
        _build({"student": _block("a")[1]}, **overrides)


def test_optimizer_must_be_name_or_callable():
    with pytest.raises(ConfigurationError, match="optimizer must be a name, a factory or None"):
        GroupSpec("x", optimizer=3)


def test_spec_without_owner_shows_near_name():
    with pytest.raises(ConfigurationError, match=r"Did you mean 'layer\.0'"):
        _build({"layer.0": _block("a")[1]}, {"layer.O": GroupSpec("layer.O")})
