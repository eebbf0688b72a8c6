"""How a model makes its logits of what its output head takes in, found out by trying it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from silverspoon_kd.capture.inputs import InputView
from silverspoon_kd.capture.names import base_of, embeddings_of, named_modules
from silverspoon_kd.capture.probe import attributes_kept, evaluating, probe
from silverspoon_kd.capture.selectors import select_logits
from silverspoon_kd.tree import map_tensors


@dataclass(frozen=True)
class HeadForm:
    """``logits = cap(scale * head(hidden))`` with ``cap(z) = soft_cap * tanh(z / soft_cap)``, and nothing else.

    Attributes:
        module: clean name of the head, an ordinary ``nn.Linear`` or one with LoRA.
        scale: factor of the head's output.
        soft_cap: bound of the logits; None for none.
        plain_loss: the model's own loss is the cross entropy of these logits; False where that was not asked.
    """

    module: str
    scale: float = 1.0
    soft_cap: float | None = None
    plain_loss: bool = False

    def logits(self, made: Tensor) -> Tensor:
        """Return the logits for what the head has made, ``[*positions, vocabulary]``."""
        logits = made * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


def head_form(
    model: nn.Module, inputs: Mapping[str, Any], *, shifts_labels: bool | None = None, adapters: bool = False
) -> HeadForm | str:
    """Return the form of a model's head, or in a few words why its logits cannot be made from its head alone.

    The forward runs twice on a tiny batch: on fake tensors, and then with random numbers in place of what everything
    but the head gives out and of what the head gives out. What comes out must be what the config promises. So no
    weight is needed, and what a model does with its logits is seen and not guessed.

    Args:
        model: left as it is.
        inputs: a tiny batch as its forward takes it.
        shifts_labels: given, the model's own loss is looked at too: whether its labels are shifted by one.
        adapters: the head may have LoRA without dropout, which is a matrix of its own added to the head's.
    """
    base = base_of(model)
    head = _usable_head(base, adapters)
    if isinstance(head, str):
        return head
    name = _name_of(model, head)
    if name is None:
        return "the output head is no module of the model"
    try:
        outputs, made = _recorded(base, head, inputs)
        if made.dim() != 3 or made.shape[-1] != head.out_features:
            return "the output head does not run on [batch, length, hidden]"
        random = torch.Generator().manual_seed(0)
        forwards = {module: _always(_random(output, random)) for module, output in outputs.items()}
        # Large enough to be bent by a cap, and exact in whatever dtype the model works.
        logits = 20 * torch.randn(made.shape, generator=random).to(made.device)
        forwards[head] = _always(logits)
        found = select_logits(_replayed(base, inputs, forwards))
        form = next((form for form in _promised(base, name) if _equal(form.logits(logits), found)), None)
        if form is None:
            return "its logits are not what its output head gives out, scaled and capped as its config says"
        plain = shifts_labels is not None and _loss_is_plain(base, inputs, forwards, form.logits(logits), shifts_labels)
    except Exception as error:  # whatever an unusual forward does
        return f"its forward cannot be tried out ({type(error).__name__}: {error})"
    return HeadForm(form.module, form.scale, form.soft_cap, plain)


def head_name(model: nn.Module) -> str | None:
    """Return the clean name of a model's output head, None if it has none."""
    head = embeddings_of(model, "output")
    return None if head is None else _name_of(model, head)


def head_tensors(head: Any) -> tuple[Tensor, Tensor | None]:
    """Return the matrix ``[vocabulary, hidden]`` and the bias of a head that has a form, with its adapters added."""
    if not hasattr(head, "get_base_layer"):
        return head.weight, head.bias
    linear = head.get_base_layer()
    weight = linear.weight
    for adapter in [] if head.disable_adapters else head.active_adapters:
        if adapter in head.lora_A:
            weight = weight + head.get_delta_weight(adapter)
    return weight, linear.bias


def _usable_head(base: Any, adapters: bool) -> Any:
    """Return the head, or why it has no form."""
    head: Any = embeddings_of(base, "output")
    if head is None:
        return "there is no output head (get_output_embeddings)"
    linear = head.get_base_layer() if adapters and hasattr(head, "get_delta_weight") else head
    if type(linear) is not nn.Linear:
        return f"the output head is a {type(head).__name__} and not an ordinary nn.Linear"
    if any("forward" in vars(each) or each._forward_hooks or each._forward_pre_hooks for each in (head, linear)):
        return "the output head has hooks"
    if linear.weight.is_meta or not linear.weight.is_floating_point():
        return "the output head has no matrix of numbers in memory"
    if linear is not head and not _adds_a_matrix(head):
        return "the output head has adapters that do more than add a matrix, such as dropout"
    return head


def _name_of(model: nn.Module, module: nn.Module) -> str | None:
    return next((name for name, each in named_modules(model) if each is module), None)


@torch.no_grad()
def _adds_a_matrix(head: Any) -> bool:
    # DoRA and other variants add a matrix at first, but not once they are trained.
    variants = getattr(head, "lora_variant", None)
    if variants or any(isinstance(module, nn.Dropout) and module.p > 0 for module in head.modules()):
        return False
    matrix, (weight, bias) = head.get_base_layer().weight, head_tensors(head)
    hidden = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix)
    wanted = head(hidden).float()
    found = functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    exact = 1e-5 if matrix.dtype.itemsize >= 4 else 0.05
    return bool((found - wanted).norm() <= exact * wanted.norm())


def _recorded(base: nn.Module, head: nn.Module, inputs: Mapping[str, Any]) -> tuple[dict[nn.Module, Any], Tensor]:
    """Return what each module beside the head gives out, and what the head does."""
    outputs: dict[nn.Module, Any] = {}
    runs: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, output: Any) -> None:
        outputs[module] = output

    def call(forward: Callable[[], Any]) -> None:
        handles = [module.register_forward_hook(keep) for module in _beside(base, head)]
        handles.append(head.register_forward_hook(lambda module, args, output: runs.append(output)))
        try:
            with torch.no_grad():
                forward()
        finally:
            for handle in handles:
                handle.remove()

    probe(base, inputs, call)
    if len(runs) != 1:
        raise ValueError(f"the output head ran {len(runs)} times")
    return outputs, runs[0]


def _beside(module: nn.Module, head: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules that the head is not in."""
    for child in module.children():
        if child is head:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or any(inner is head for inner in child.modules()):
            yield from _beside(child, head)
        else:
            yield child


def _promised(base: Any, name: str) -> Iterator[HeadForm]:
    """Yield what the config may say of the logits (Cohere, Granite, Gemma), and that nothing is done to them."""
    config: Any = getattr(base, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    yield HeadForm(name)
    yield HeadForm(name, float(scale), float(cap) if cap else None)


def _replayed(base: nn.Module, inputs: Mapping[str, Any], forwards: Mapping[nn.Module, Callable[..., Any]]) -> Any:
    device = next((tensor.device for tensor in base.parameters()), torch.device("cpu"))
    given = map_tensors(lambda tensor: tensor.to(device), dict(inputs))
    with evaluating(base), attributes_kept(base), torch.random.fork_rng(devices=[]), torch.no_grad():
        for module, forward in forwards.items():
            module.forward = forward
        return base(**given)


def _loss_is_plain(
    base: nn.Module,
    inputs: Mapping[str, Any],
    forwards: Mapping[nn.Module, Callable[..., Any]],
    logits: Tensor,
    shifts: bool,
) -> bool:
    view = InputView(base, "student")
    if "labels" not in view.names:
        return False
    labels = (torch.arange(logits[..., 0].numel()) * 7 % logits.shape[-1]).view(logits.shape[:-1])
    labels[0, -1] = -100
    count = labels != -100
    wanted, expected = labels, logits
    if shifts:
        wanted, expected, count = labels[:, 1:], logits[:, :-1], count[:, 1:]
    extra = {"num_items_in_batch": count.sum()} if view.takes_num_items else {}
    output = _replayed(base, {**inputs, "labels": labels, **extra}, forwards)
    loss = output["loss"] if isinstance(output, Mapping) else output[0]
    wanted = wanted.to(logits.device).flatten()
    return _equal(functional.cross_entropy(expected.flatten(0, 1), wanted), loss)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-5)


def _random(output: Any, random: torch.Generator) -> Any:
    def numbers(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return torch.randn(tensor.shape, generator=random).to(tensor.device, tensor.dtype)

    return map_tensors(numbers, output)


def _always(value: Any) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return value

    return forward
