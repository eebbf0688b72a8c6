"""Losses by name."""

import re

import pytest
import torch

from silverspoon_kd import losses
from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import (
    CallableLoss,
    Loss,
    available_losses,
    get_loss_function,
    kl_divergence_loss,
    mse_loss,
    register_loss,
    registry,
)

NAMES = {
    "mse": (),
    "normalized_mse": (),
    "cosine": (),
    "smooth_l1": (),
    "kl_divergence": ("kl_div",),
    "reverse_kl": (),
    "jsd": (),
    "logit_lens_kl": (),
    "contrastive": (),
    "angular_magnitude": (),
    "mahalanobis_mse": ("mahal_mse",),
    "mahalanobis_cosine": ("mahal_cosine",),
    "relkd_distance": (),
    "relkd_angle": (),
    "relkd_distance_angle": ("relkd_da",),
    "attention": (),
    "cka": (),
}


@pytest.fixture
def own_names(monkeypatch):
    """Take back the names that a test registers."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(registry, "_names", dict(registry._names))


def test_the_names_are_those_of_the_documentation():
    assert {record.name: record.aliases for record in available_losses()} == NAMES
    assert [record.name for record in available_losses()] == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_has_a_factory_with_the_same_defaults(name):
    factory = getattr(losses, f"{name}_loss")
    for alias in (name, *NAMES[name]):
        assert type(get_loss_function(alias)) is type(factory())
    record = next(record for record in available_losses() if record.name == name)
    assert all(getattr(factory(), field) == default for field, default in record.defaults.items())
    assert record.summary.endswith(".")


def test_documented_signatures():
    kl, jsd = kl_divergence_loss(2.0, 16), losses.jsd_loss(2.0, 0.1, 16)
    assert (kl.temperature, kl.chunk_size) == (2.0, 16)
    assert (jsd.temperature, jsd.beta, jsd.chunk_size) == (2.0, 0.1, 16)
    records = {record.name: dict(record.defaults) for record in available_losses()}
    assert records["kl_divergence"] == {"temperature": 1.0, "chunk_size": 0}
    assert records["jsd"] == {"temperature": 1.0, "beta": 0.5, "chunk_size": 0}


def test_keyword_arguments_reach_the_loss():
    assert get_loss_function("kl_div", temperature=3.0) == kl_divergence_loss(temperature=3.0)


@pytest.mark.parametrize(("wrong", "near"), [("msee", "mse"), ("KL_Div", "kl_div"), ("smooth-l1", "smooth_l1")])
def test_g_15_an_unknown_name_shows_the_near_name_and_all_names(wrong, near):
    with pytest.raises(ValueError) as error:
        get_loss_function(wrong)
    assert isinstance(error.value, LossError)
    assert re.search(rf"There is no loss '{wrong}'\. Did you mean '{near}'", str(error.value))
    assert all(name in str(error.value) for name in NAMES)


def test_g_15_an_unknown_keyword_argument_names_the_accepted_ones():
    with pytest.raises(
        LossError, match=r"'kl_divergence' has no keyword argument 'temprature'\. Did you mean 'temperature'\?"
    ):
        get_loss_function("kl_divergence", temprature=2)
    with pytest.raises(LossError, match="Accepted are: temperature, beta, chunk_size"):
        get_loss_function("jsd", gamma=2)
    with pytest.raises(LossError, match="'mse' has no keyword argument 'reduction'. It takes none."):
        get_loss_function("mse", reduction="sum")


def test_a_loss_or_its_class_is_taken_as_it_is():
    loss = kl_divergence_loss(temperature=2.0)
    assert get_loss_function(loss) is loss
    assert get_loss_function(kl_divergence_loss, temperature=2.0) == loss
    with pytest.raises(LossError, match="built already"):
        get_loss_function(loss, temperature=3.0)


def test_a_class_of_ones_own(own_names):
    @register_loss("twice_mse", "mse2")
    class Twice(Loss):
        """Two times the mean squared error."""

        positions = "targets"

        def sum_and_count(self, student, teacher, mask=None):
            return mse_loss().sum_and_count(2**0.5 * student, 2**0.5 * teacher, mask)

    loss = get_loss_function("mse2")
    assert isinstance(loss, Twice) and loss.name == "twice_mse"
    assert loss(torch.ones(2, 3), torch.zeros(2, 3)).item() == pytest.approx(2)
    record = next(record for record in available_losses() if record.name == "twice_mse")
    assert (record.aliases, record.summary, record.defaults) == (("mse2",), "Two times the mean squared error.", {})


def test_a_function_of_two_tensors(own_names):
    @register_loss("power")
    def power(student, teacher, exponent=2.0, *, mask=None):
        """A power of the absolute difference."""
        return (student - teacher).abs().pow(exponent).mean()

    loss = get_loss_function("power", exponent=3)
    assert isinstance(loss, CallableLoss)
    assert loss(2 * torch.ones(2, 3), torch.zeros(2, 3)).item() == 8
    assert power(torch.ones(1), torch.zeros(1)) == 1  # still the function
    record = next(record for record in available_losses() if record.name == "power")
    assert (record.summary, record.defaults) == ("A power of the absolute difference.", {"exponent": 2.0})
    with pytest.raises(LossError, match="Accepted are: exponent"):
        get_loss_function("power", exponents=3)


def test_a_factory(own_names):
    @register_loss("hot_kl")
    def make(temperature=8.0):
        return kl_divergence_loss(temperature=temperature)

    @register_loss("scaled")
    def scaled(scale):
        return lambda student, teacher: scale * (student - teacher).square().mean()

    assert get_loss_function("hot_kl") == kl_divergence_loss(temperature=8.0)
    assert get_loss_function("hot_kl", temperature=2) == kl_divergence_loss(temperature=2)
    assert get_loss_function("scaled", scale=3)(torch.ones(2, 3), torch.zeros(2, 3)).item() == 3
    with pytest.raises(LossError, match="'scaled' needs the keyword argument 'scale'"):
        get_loss_function("scaled")


@pytest.mark.parametrize("names", [("mse",), ("kl_div",), ("new", "relkd_da")])
def test_a_name_is_given_once(own_names, names):
    with pytest.raises(LossError, match=f"{names[-1]!r} is taken"):
        register_loss(*names)(lambda: mse_loss())
    assert {record.name for record in available_losses()} == set(NAMES)
