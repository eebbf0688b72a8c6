"""Removing channels with torch-pruning; imported only when something is pruned."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.model_tools.configs import output_width
from silverspoon_kd.model_tools.prune_checks import WHOLE_HEADS

# Attention that is traced by its border only: the layers that read the hidden state and the one that writes it.
_BORDERS = ((WHOLE_HEADS[:3], "o_proj"), (("c_attn",), "c_proj"), (("query_key_value",), "dense"))


def cut_channels(
    model: nn.Module,
    widths: Mapping[str, int],
    *,
    example_inputs: Any,
    output_transform: Callable[[Any], Any],
    ignored: Sequence[str],
    groups: Mapping[str, int],
    forward_fn: Callable[[nn.Module, Any], Any] | None,
    whole_heads: bool,
) -> None:
    """Remove output channels until every layer of ``widths`` has its number, with all that depends on them.

    Args:
        model: Changed in place.
        widths: Module name -> output channels that stay.
        example_inputs: Inputs of one forward.
        output_transform: Picks the tensors that the trace starts from.
        ignored: Names of modules that keep their output channels.
        groups: Module name -> groups of output channels that lose the same channels each.
        forward_fn: Replaces the call of the model.
        whole_heads: Cut attention by whole heads; whoever uses the result must know the new number of heads.

    Raises:
        ConfigurationError: The model cannot be traced, or numbers do not fit its groups.
    """
    with _as_linear(model):
        get = model.get_submodule
        borders = {module: border for module in model.modules() if whole_heads and (border := _border(module))}
        targets = {get(name): width for name, width in widths.items()}
        for attention in filter(_is_attention, borders):
            _cut_heads(attention, {name: targets.get(getattr(attention, name)) for name in WHOLE_HEADS})
        heads = [reader for readers, _ in borders.values() for reader in readers]
        graph = _trace(model, borders, example_inputs, output_transform, forward_fn)
        kept = [*map(get, ignored), *heads]
        rest = {module: width for module, width in targets.items() if module not in heads}
        _cut_groups(graph, rest, kept, {get(name): number for name, number in groups.items()})


@contextmanager
def _as_linear(model: nn.Module) -> Iterator[None]:
    """Turn GPT-2's linear layers (weight [in, out]) into ``nn.Linear``, the kind torch-pruning knows, and back."""
    with torch.no_grad():
        changed = [name for name, module in model.named_modules() if isinstance(module, Conv1D)]
        for name in changed:
            layer: Any = model.get_submodule(name)
            linear = nn.Linear(layer.nx, layer.nf, device="meta")
            linear.weight, linear.bias = nn.Parameter(layer.weight.T.contiguous()), layer.bias
            model.set_submodule(name, linear)
    try:
        yield
    finally:
        for name in changed:
            linear = model.get_submodule(name)  # type: ignore[assignment]
            with torch.device("meta"):  # the values exist already
                layer = Conv1D(linear.out_features, linear.in_features)
            layer.weight, layer.bias = nn.Parameter(linear.weight.detach().T.contiguous()), linear.bias
            model.set_submodule(name, layer)


def _trace(
    model: nn.Module,
    borders: Mapping[nn.Module, tuple[list[nn.Module], nn.Module]],
    example_inputs: Any,
    output_transform: Callable[[Any], Any],
    forward_fn: Callable[[nn.Module, Any], Any] | None,
) -> tp.DependencyGraph:
    projected: list[Tensor] = []

    def transform(output: Any) -> list[Tensor]:
        return [*tp.utils.flatten_as_list(output_transform(output)), *projected]

    if not isinstance(example_inputs, Tensor | Mapping):
        example_inputs = tuple(example_inputs)
    with _separable(borders, projected), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch-pruning reports every norm weight
        try:
            return tp.DependencyGraph().build_dependency(
                model,
                example_inputs=example_inputs if isinstance(example_inputs, Tensor | tuple) else dict(example_inputs),
                forward_fn=forward_fn,
                output_transform=transform,
                verbose=False,
            )
        except Exception as error:
            raise ConfigurationError(
                f"torch-pruning cannot trace {type(model).__name__}: {type(error).__name__}: {error} Check "
                "example_inputs, forward_fn and output_transform."
            ) from error


@contextmanager
def _separable(
    borders: Mapping[nn.Module, tuple[list[nn.Module], nn.Module]], projected: list[Tensor]
) -> Iterator[None]:
    """Let attention modules compute, during the trace, something in which only channels of the hidden state are tied.

    The real forward (rotary embeddings, repeated key-value heads) ties every channel to every other in a graph that
    torch-pruning cannot follow. Heads are cut before, so only two facts are left to trace: which layers read the hidden
    state and which one writes it.
    """

    def stand_in(readers: Sequence[nn.Module], writer: Any) -> Callable[..., tuple[Tensor, None]]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            projected.extend(reader(hidden_states) for reader in readers)
            return writer(hidden_states.new_zeros(*hidden_states.shape[:-1], writer.in_features)), None

        return forward

    for attention, (readers, writer) in borders.items():
        attention.forward = stand_in(readers, writer)
    try:
        yield
    finally:
        for attention in borders:
            del attention.forward


def _cut_groups(
    graph: tp.DependencyGraph,
    targets: Mapping[nn.Module, int],
    ignored: list[nn.Module],
    groups: Mapping[nn.Module, int],
) -> None:
    """Cut group by group; a group is what must lose the same channels together.

    Groups are made only from layers that shrink: made from others, some would take for ever and none is needed.
    """
    importance = tp.importance.GroupMagnitudeImportance(p=2)
    for module, target in targets.items():
        width = output_width(module)
        if width is None or target == width or module not in graph.module2node:
            continue
        prune = graph.get_pruner_of_module(module).prune_out_channels
        group = graph.get_pruning_group(module, prune, list(range(width)))
        for dep, _ in group:
            if dep.target.module in ignored and graph.is_out_channel_pruning_fn(dep.handler):
                raise ConfigurationError(
                    f"{group[0].dep.target.name} should shrink from {width} to {target} channels, but "
                    f"{dep.target.name} loses the same ones and is kept whole by ignored_layers. Choose one of the two."
                )
        _check_target(group, targets, width, target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            group.prune(idxs=_least(importance(group), width, target, _num_groups(graph, group, groups)))


def _check_target(group: tp.Group, targets: Mapping[nn.Module, int], width: int, target: int) -> None:
    if target > width:
        raise ConfigurationError(
            f"{group[0].dep.target.name} has {width} channels, but {target} were asked; pruning only removes. Use "
            "reconfig_model to build a wider model."
        )
    wanted = {
        dep.target.name: targets[dep.target.module]
        for dep, idxs in group
        if dep.target.module in targets and dep.handler.__name__ == "prune_out_channels" and len(idxs) == width
    }
    if len(set(wanted.values())) > 1:
        raise ConfigurationError(
            f"Different widths were asked for layers whose channels are added to one another: {wanted}. Ask for one "
            "width."
        )


def _num_groups(graph: tp.DependencyGraph, group: tp.Group, groups: Mapping[nn.Module, int]) -> int:
    found = [1]
    for dep, _ in group:
        module = dep.target.module
        if not graph.is_out_channel_pruning_fn(dep.handler):
            continue
        found.append(groups.get(module, 1))
        depthwise = isinstance(module, nn.modules.conv._ConvNd) and module.groups == module.out_channels
        if isinstance(module, nn.modules.conv._ConvNd | nn.GroupNorm) and not depthwise:
            found.append(module.groups if isinstance(module, nn.modules.conv._ConvNd) else module.num_groups)
    return max(found)


def _least(importance: Tensor | None, width: int, target: int, num_groups: int) -> list[int]:
    """Indices of the least important channels, the same in each of ``num_groups`` equal parts."""
    if width % num_groups or target % num_groups:
        raise ConfigurationError(
            f"{width} channels in {num_groups} groups or heads cannot be cut to {target}: each part must lose the same "
            f"number. Ask for a multiple of {num_groups}."
        )
    scores = torch.zeros(width) if importance is None else importance.detach()
    part = width // num_groups
    local = scores.view(num_groups, part).mean(0).argsort()[: (width - target) // num_groups]
    return sorted(int(index) + part * number for number in range(num_groups) for index in local)


def _border(module: nn.Module) -> tuple[list[nn.Module], nn.Module] | None:
    children = dict(module.named_children())
    for reading, writing in _BORDERS:
        if all(isinstance(children.get(name), nn.Linear) for name in (*reading, writing)):
            return [children[name] for name in reading], children[writing]
    return None


def _is_attention(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return all(isinstance(children.get(name), nn.Linear) for name in WHOLE_HEADS)


def _cut_heads(attention: Any, wanted: Mapping[str, int | None]) -> None:
    q, k, v, o = (getattr(attention, name) for name in WHOLE_HEADS)
    new_queries, new_keys = (wanted[name] or getattr(attention, name).out_features for name in ("q_proj", "k_proj"))
    if (new_queries, new_keys) == (q.out_features, k.out_features):
        return
    size = int(attention.head_dim)
    num_heads, num_groups = q.out_features // size, k.out_features // size
    new_heads, new_groups = new_queries / size, new_keys / size
    if new_heads % 1 or new_groups % 1 or new_heads % new_groups or new_heads / new_groups > num_heads // num_groups:
        raise ConfigurationError(
            f"Attention with {num_heads} query heads and {num_groups} key-value heads of size {size} cannot be cut to "
            f"{new_heads:g} and {new_groups:g}: heads are removed whole, each key-value head keeps as many query heads "
            f"as any other and at most its {num_heads // num_groups}. Change num_attention_heads and "
            "num_key_value_heads together and leave head_dim alone."
        )
    keep_groups, keep_heads = _important_heads(attention, size, int(new_heads), int(new_groups))
    for layer, keep in ((q, keep_heads), (k, keep_groups), (v, keep_groups)):
        tp.prune_linear_out_channels(layer, _outside(keep, layer.out_features, size))
    tp.prune_linear_in_channels(o, _outside(keep_heads, o.in_features, size))


@torch.no_grad()
def _important_heads(attention: Any, size: int, new_heads: int, new_groups: int) -> tuple[list[int], list[int]]:
    """The key-value heads that stay, by the weights of all that hangs on them, and their best query heads."""
    q, k, v, o = (getattr(attention, name).weight.double() for name in WHOLE_HEADS)
    per_group = q.shape[0] // k.shape[0]
    queries = (q.square().sum(1) + o.square().sum(0)).view(-1, size).sum(1)
    groups = (k.square().sum(1) + v.square().sum(1)).view(-1, size).sum(1) + queries.view(-1, per_group).sum(1)
    keep_groups = sorted(groups.topk(new_groups).indices.tolist())
    keep_heads = []
    for group in keep_groups:
        own = queries[group * per_group : (group + 1) * per_group].topk(new_heads // new_groups).indices.tolist()
        keep_heads += sorted(group * per_group + index for index in own)
    return keep_groups, keep_heads


def _outside(keep: Sequence[int], width: int, size: int) -> list[int]:
    kept = {head * size + offset for head in keep for offset in range(size)}
    return [index for index in range(width) if index not in kept]
