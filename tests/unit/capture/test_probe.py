"""Shapes without data: the model is left exactly as it was."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from silverspoon_kd.capture.probe import example_inputs, probe
from silverspoon_kd.tree import tensors_in
from support.architectures import ARCHITECTURES, mixtral, resnet, t5, vit
from support.tiny import PAD, qwen3


def shapes_of(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor], list[Tensor]]:
    """What one probe gives: shapes, what stood for the parameters, and the tensors themselves."""
    tensors: list[Tensor] = []

    def call(forward):
        tensors.extend(tensors_in(forward()))
        return [tuple(tensor.shape) for tensor in tensors]

    return *probe(model, inputs, call), tensors


class Strange(nn.Module):
    """Does to itself whatever a forward can do to its module."""

    def __init__(self, looks_at_values: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.mask: Tensor | None = None
        self.looks_at_values, self.forwards = looks_at_values, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.steps = self.steps * 2
        self.forwards += 1
        if self.mask is None:
            self.mask = torch.ones_like(x).tril()
            self.register_buffer("late", torch.ones(3))
        x = self.dropout(self.norm(self.linear(x + torch.randn_like(x)))) * self.mask
        return x * 2 if self.looks_at_values and x.sum() > 0 else x


@pytest.mark.parametrize("looks_at_values", [False, True], ids=["fake", "real"])
def test_the_model_and_the_random_numbers_are_left_as_they_were(looks_at_values: bool) -> None:
    model = Strange(looks_at_values)
    model.norm.eval()  # a mode of its own
    mine = model.linear.register_forward_hook(lambda *_: None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    attributes = {name: id(value) for name, value in vars(model).items()}
    random = torch.random.get_rng_state()

    shapes, parameters, tensors = shapes_of(model, {"x": torch.zeros(3, 4)})

    assert shapes == [(3, 4)] and isinstance(tensors[0], FakeTensor) is not looks_at_values
    assert set(parameters) == {"linear.weight", "linear.bias", "norm.weight", "norm.bias"}
    assert torch.equal(torch.random.get_rng_state(), random)
    assert model.state_dict().keys() == before.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]} == identities
    assert {name: id(value) for name, value in vars(model).items()} == attributes
    assert model.mask is None and model.forwards == 0
    assert [module.training for module in (model, model.linear, model.norm)] == [True, True, False]
    assert list(model.linear._forward_hooks) == [mine.id] and not model._forward_hooks
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert model(torch.randn(3, 4)).shape == (3, 4)  # nothing fake stayed inside


def test_the_graph_leads_to_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.forward = lambda x: nn.Sequential.forward(model, x)
    _, parameters, tensors = shapes_of(model, {"x": torch.zeros(1, 4)})
    gradients = torch.autograd.grad(tensors[0].sum(), list(parameters.values()))
    assert [tuple(gradient.shape) for gradient in gradients] == [tuple(p.shape) for p in model.parameters()]


def test_frozen_parameters_stay_frozen_in_the_graph() -> None:
    model = nn.Linear(4, 2)
    model.weight.requires_grad_(False)
    model.forward = lambda x: nn.Linear.forward(model, x)
    _, parameters, _ = shapes_of(model, {"x": torch.zeros(1, 4)})
    assert not parameters["weight"].requires_grad and parameters["bias"].requires_grad


def test_an_error_of_the_model_itself_is_raised_and_the_mode_put_back() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("my own")

    model = nn.ModuleDict({"inner": Broken()})
    model.forward = lambda x: model["inner"](x)
    with pytest.raises(ArithmeticError, match="my own"):
        shapes_of(model, {"x": torch.zeros(1)})
    assert model.training and model["inner"].training


def test_experts_without_a_fake_form_run_for_real_and_quietly(caplog, capfd) -> None:
    model = mixtral(0, experts_implementation="grouped_mm")
    with caplog.at_level(logging.WARNING):
        shapes, parameters, tensors = shapes_of(model, example_inputs(model))
    assert shapes[0][-1] == 64 and not isinstance(tensors[0], FakeTensor)
    assert parameters["lm_head.weight"] is model.lm_head.weight
    assert caplog.records == [] and capfd.readouterr() == ("", "")
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


@pytest.mark.parametrize("name", ["qwen3", "bert", "t5", "vit", "resnet", "albert", "gpt2"])
def test_inputs_can_be_made_from_the_config(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build(0).double()
    shapes, _, tensors = shapes_of(model, example_inputs(model))
    logits = model.eval()(**{k: v for k, v in architecture.batch().items()}).logits
    assert shapes[0][-1] == logits.shape[-1]
    assert isinstance(tensors[0], FakeTensor) and tensors[0].dtype == torch.float64


def test_images_have_the_size_and_dtype_of_the_model() -> None:
    assert example_inputs(vit(0))["pixel_values"].shape == (1, 3, 16, 16)
    assert example_inputs(vit(0, image_size=(8, 24)))["pixel_values"].shape == (1, 3, 8, 24)
    assert example_inputs(resnet(0, num_channels=1))["pixel_values"].shape == (1, 1, 64, 64)
    assert example_inputs(vit(0).to(torch.bfloat16))["pixel_values"].dtype == torch.bfloat16


def test_inputs_of_text_models() -> None:
    assert {"input_ids", "decoder_input_ids"} <= example_inputs(t5(0)).keys()
    ids = example_inputs(qwen3(layers=1, hidden=16))["input_ids"]
    assert ids.dtype == torch.int64 and ids.max() < 64 and ids.min() >= PAD


def test_no_inputs_can_be_made_for_a_plain_module() -> None:
    assert example_inputs(nn.Linear(2, 2)) is None
