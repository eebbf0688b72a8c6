import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from transformers import get_scheduler

from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.optim import GroupSpec, build_optimizer, build_parameter_groups, per_group_schedule

SGD = (torch.optim.SGD, {"lr": 1e-3})


def _optimizer(rates: dict[str, float], named=None):
    owned = {name: [(f"{name}.weight", nn.Parameter(torch.zeros(2)))] for name in rates}
    specs = {name: GroupSpec(name, learning_rate=rate) for name, rate in rates.items()}
    groups = build_parameter_groups(owned, specs, learning_rate=1e-3, weight_decay=0.0, decay_names=set())
    return build_optimizer(groups, SGD, named or {})


def _base(name="linear", warmup=0, steps=4, **kwargs):
    return partial(get_scheduler, name, num_warmup_steps=warmup, num_training_steps=steps, **kwargs)


def _used(optimizer, schedule, steps: int) -> dict[str, list[float]]:
    used = {group["alignment"]: [] for group in optimizer.param_groups}
    for _ in range(steps):
        for group in optimizer.param_groups:
            used[group["alignment"]].append(group["lr"])
        optimizer.step()
        schedule.step()
    for group in optimizer.param_groups:
        used[group["alignment"]].append(group["lr"])
    return used


@pytest.mark.parametrize("own_optimizer", [{}, {"second": "adagrad"}])
def test_i_01_linear_rates_of_two_groups(own_optimizer):
    optimizer = _optimizer({"first": 1e-3, "second": 1e-4}, own_optimizer)
    schedule = per_group_schedule(optimizer, _base(), {}, 0, 4)
    used = _used(optimizer, schedule, 4)
    expected = [1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0]
    assert used["first"] == pytest.approx(expected, rel=1e-12, abs=1e-18)
    assert used["second"] == pytest.approx([rate / 10 for rate in expected], rel=1e-12, abs=1e-18)
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-3, 1e-4]


@pytest.mark.parametrize("own_optimizer", [{}, {"cosine": "adagrad"}])
def test_i_01_groups_follow_their_own_curve(own_optimizer):
    optimizer = _optimizer({"linear": 1e-3, "cosine": 2e-4, "flat": 3e-4}, own_optimizer)
    named = {"cosine": "cosine", "flat": "constant"}
    schedule = per_group_schedule(optimizer, _base(warmup=1, steps=5), named, 1, 5)
    used = _used(optimizer, schedule, 5)
    decay = [0.0] + [(5 - step) / 4 for step in range(1, 6)]
    cosine = [0.0] + [0.5 * (1 + math.cos(math.pi * (step - 1) / 4)) for step in range(1, 6)]
    assert used["linear"] == pytest.approx([1e-3 * f for f in decay], abs=1e-15)
    assert used["cosine"] == pytest.approx([2e-4 * f for f in cosine], abs=1e-15)
    assert used["flat"] == [3e-4] * 6


def test_no_wish_returns_the_base_itself():
    optimizer = _optimizer({"a": 1.0})
    made = []

    def base(target):
        made.append(StepLR(target, 1))
        return made[0]

    assert per_group_schedule(optimizer, base, {"elsewhere": "cosine"}, 0, 4) is made[0]


def test_factory_sees_the_rates_of_its_alignment():
    seen = {}

    def factory(optimizer, num_warmup_steps, num_training_steps):
        seen.update(rates=[g["lr"] for g in optimizer.param_groups], default=optimizer.defaults["lr"])
        return LambdaLR(optimizer, lambda step: 0.5**step if step < num_training_steps else num_warmup_steps)

    optimizer = _optimizer({"a": 1.0, "b": 0.25})
    used = _used(optimizer, per_group_schedule(optimizer, _base(warmup=2), {"b": factory}, 2, 4), 4)
    assert seen == {"rates": [0.25], "default": 0.25}
    assert used["b"] == [0.25, 0.125, 0.0625, 0.03125, 0.5]
    assert used["a"] == [0.0, 0.5, 1.0, 0.5, 0.0]


def test_state_round_trip_goes_on_with_the_same_rates():
    rates = {"a": 1.0, "b": 0.5}

    def make():
        optimizer = _optimizer(rates)
        return optimizer, per_group_schedule(optimizer, _base(steps=6), {"b": "cosine"}, 0, 6)

    optimizer, schedule = make()
    _used(optimizer, schedule, 3)
    again, resumed = make()
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert _used(again, resumed, 3) == _used(optimizer, schedule, 3)


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_base_that_is_no_function_of_the_step_cannot_be_mixed(name):
    optimizer = _optimizer({"a": 1.0})
    with pytest.raises(ConfigurationError, match="lr_scheduler_type"):
        per_group_schedule(optimizer, _base(name), {"a": "cosine"}, 0, 4)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("cosin", "Did you mean 'cosine'"),
        ("reduce_lr_on_plateau", "function of the step"),
        ("cosine_with_min_lr", "factory"),
        ("warmup_stable_decay", "factory"),
        (lambda optimizer, *_: StepLR(optimizer, 1), "StepLR"),
    ],
)
def test_schedules_that_cannot_serve_are_refused(wish, message):
    with pytest.raises(ConfigurationError, match=message):
        per_group_schedule(_optimizer({"a": 1.0}), _base(), {"a": wish}, 0, 4)
