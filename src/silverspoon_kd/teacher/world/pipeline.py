"""Which device of a pipeline holds which part of a model."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from torch import nn

from silverspoon_kd.capture import base_of


def pipeline_map(teacher: nn.Module, devices: Sequence[str]) -> dict[str, str]:
    """Divide a model into runs of consecutive parts, one for each device, the fullest as small as possible.

    A part is a block (a class of ``_no_split_modules``, else of a list of modules) or what lies between blocks; parts
    that share weights, such as a tied head and its embeddings, stay together. Tables without weights, such as rotary
    ones, are on the first device, which needs them first: from the last it would wait for them in every micro-batch.

    Args:
        teacher: the model; only sizes are read.
        devices: in the order of the pipeline.

    Returns:
        The device by module name (or by parameter name, for what the model itself holds), which covers the model.
    """
    base = base_of(teacher)
    blocks = set(getattr(base, "_no_split_modules", None) or _repeated_blocks(base))
    owner: dict[int, int] = {}
    parts: list[list[str]] = []
    sizes: list[int] = []
    tables: list[str] = []
    for name, held in _parts(base, "", blocks):
        if not any(isinstance(tensor, nn.Parameter) for tensor in held):
            tables.append(name)
            continue
        tensors = {id(tensor): tensor.numel() * tensor.element_size() for tensor in held}
        shared = next((owner[key] for key in tensors if key in owner), None)
        place = len(parts) if shared is None else shared
        if shared is None:
            parts.append([])
            sizes.append(0)
        parts[place].append(name)
        sizes[place] += sum(size for key, size in tensors.items() if key not in owner)
        owner.update(dict.fromkeys(tensors.keys() - owner.keys(), place))
    cut = cut_evenly(sizes, len(devices))
    found = {name: devices[number] for names, number in zip(parts, cut, strict=True) for name in names}
    return found | dict.fromkeys(tables, devices[0])


def cut_evenly(sizes: Sequence[int], num_runs: int) -> list[int]:
    """Number each of ``sizes`` by its run, so that the largest sum of a run is as small as possible and none is empty.

    With fewer sizes than runs the last runs stay empty.
    """
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if max(_fill(sizes, middle)) < num_runs else (middle + 1, high)
    numbers = _fill(sizes, low)
    # Move the last ones on where runs would stay empty: that makes no run larger.
    for back in range(1, min(num_runs, len(sizes)) + 1):
        numbers[-back] = max(numbers[-back], num_runs - back) if len(sizes) >= num_runs else numbers[-back]
    return numbers


def _fill(sizes: Sequence[int], limit: int) -> list[int]:
    numbers, number, used = [], 0, 0
    for size in sizes:
        if used and used + size > limit:
            number, used = number + 1, 0
        used += size
        numbers.append(number)
    return numbers or [0]


def _parts(module: nn.Module, prefix: str, blocks: Collection[str]) -> Iterator[tuple[str, list]]:
    """Yield names with the tensors below them, in the order of definition."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, tensor in own:
        yield f"{prefix}{name}", [tensor]
    for name, child in module.named_children():
        held = list(chain(child.parameters(), child.buffers()))
        divisible = any(True for _ in child.children()) and not _holds_tensors(child)
        if divisible and type(child).__name__ not in blocks:
            yield from _parts(child, f"{prefix}{name}.", blocks)
        elif held:
            yield f"{prefix}{name}", held


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in chain(module.parameters(recurse=False), module.buffers(recurse=False)))


def _repeated_blocks(base: nn.Module) -> set[str]:
    """Return the classes that make up a list of modules, which is what a block is where the model does not say."""
    return {type(child).__name__ for module in base.modules() if isinstance(module, nn.ModuleList) for child in module}
