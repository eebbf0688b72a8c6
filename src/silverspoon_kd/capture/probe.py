"""A forward without data and without arithmetic: shapes, and which parameters are used."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from silverspoon_kd.capture.names import base_of
from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.tree import map_tensors

logger = logging.getLogger(__name__)


def example_inputs(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a tiny batch for a transformers model of text or images, None where none can be made from its config."""
    base = base_of(model)
    config, main = getattr(base, "config", None), getattr(base, "main_input_name", None)
    if config is None or main is None:
        return None
    if main == "input_ids":
        return dict(base.dummy_inputs)  # type: ignore[arg-type]
    if main == "pixel_values":
        size = getattr(config, "image_size", None) or 64
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        dtype = next((tensor.dtype for tensor in base.parameters()), torch.float32)
        return {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), height, width, dtype=dtype)}
    return None


def probe(
    model: nn.Module, inputs: Mapping[str, Any], call: Callable[[Callable[[], Any]], Any]
) -> tuple[Any, dict[str, Tensor]]:
    """Run one forward of ``model`` in evaluation mode on fake tensors, or on the real ones where that is impossible.

    Fake tensors have shapes and an autograd graph and cost no memory; models whose path depends on values (some routers
    of mixtures of experts) are run for real, on the same tiny inputs.

    Args:
        model: left as it is.
        inputs: keyword arguments of its forward, real tensors.
        call: is given the forward as a function and returns what is wanted of it.

    Returns:
        What ``call`` returned, and the tensor that stood for each parameter by name.

    Raises:
        ConfigurationError: only a real forward would do, and the weights are partitioned over ranks.
    """
    with evaluating(model):
        try:
            return fake_forward(model, inputs, call)
        except Exception as error:
            logger.debug("A forward on fake tensors is not possible for %s: %s", type(model).__name__, error)
            if any(_whole_shape(parameter) != parameter.shape for parameter in model.parameters()):
                raise ConfigurationError(
                    f"{type(model).__name__} was partitioned by ZeRO-3 when it was made, and without its weights its "
                    f"shapes cannot be found ({error}). Make it before the TrainingArguments."
                ) from error
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        moved = map_tensors(lambda tensor: tensor.to(device), dict(inputs))
        buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
        with attributes_kept(model), torch.random.fork_rng(devices=[]):
            return call(lambda: functional_call(model, buffers, (), moved)), dict(model.named_parameters())


def fake_forward(
    model: nn.Module,
    inputs: Mapping[str, Any],
    call: Callable[[Callable[[], Any]], Any],
    *,
    place: Callable[[str, Tensor], torch.device] | None = None,
    change: Callable[[Tensor], Tensor] | None = None,
    watch: AbstractContextManager | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """Run one forward of ``model`` in evaluation mode on fake tensors.

    Args:
        model: left as it is, also where ``call`` sets attributes of its modules.
        inputs: keyword arguments of its forward, real tensors.
        call: as for :func:`probe`.
        place: the device of each parameter and buffer; None: where it is.
        change: makes the tensors of the inputs, fake ones, what the forward gets; None: they are.
        watch: around the forward, inside of what makes tensors fake.

    Raises:
        Exception: of any kind, where an operation has no fake form or depends on values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    home = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))

    def fake(name: str, tensor: Tensor) -> Tensor:
        with mode:
            return _stand_in(mode, tensor).to(tensor.device if place is None else place(name, tensor))

    parameters: dict[str, Tensor] = {name: fake(name, tensor) for name, tensor in model.named_parameters()}
    buffers = {name: fake(name, tensor) for name, tensor in model.named_buffers()}
    given = map_tensors(lambda tensor: mode.from_tensor(tensor.to(home)), dict(inputs))

    def forward() -> Any:
        with mode, watch or nullcontext():
            tensors = map_tensors(change, given) if change else given
            return functional_call(model, {**parameters, **buffers}, (), tensors)

    with evaluating(model), attributes_kept(model), _quiet():
        return call(forward), parameters


def _stand_in(mode: FakeTensorMode, parameter: Tensor) -> Tensor:
    shape = _whole_shape(parameter)
    if shape == parameter.shape:
        return mode.from_tensor(parameter)
    with mode:
        return torch.empty(shape, dtype=parameter.dtype, device=parameter.device, requires_grad=parameter.requires_grad)


def _whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape; ZeRO-3 leaves an empty tensor in the place of a weight, and the shape as an attribute."""
    return getattr(parameter, "ds_shape", parameter.shape)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing a traceback for each operation that has no fake form: the real forward comes next."""
    noisy = logging.getLogger("torch._subclasses.fake_tensor")
    before, noisy.disabled = noisy.disabled, True
    try:
        yield
    finally:
        noisy.disabled = before


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Undo what the forward keeps on its modules, such as a causal mask made once: a fake one would not work again."""
    before = [(kept, dict(kept)) for module in model.modules() for kept in (module._buffers, vars(module))]
    try:
        yield
    finally:
        for kept, content in before:
            kept.clear()
            kept.update(content)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout and running statistics off and put each module's own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
