"""Module names as users write them, whatever wrappers lie between.

DDP, FSDP1, activation checkpointing, ``torch.compile`` and PEFT insert components into dotted names. An alignment is
written with clean names once and finds its module before and after wrapping.
"""

from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from silverspoon_kd.errors import AlignmentError, near_names

_INSERTED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def is_peft_model(model: nn.Module) -> bool:
    """Tell a PEFT wrapper without importing peft."""
    return any(base.__name__ == "PeftModel" for base in type(model).__mro__)


def base_of(model: nn.Module) -> nn.Module:
    """Return the model under DDP, DataParallel, FSDP1, checkpointing, ``torch.compile`` and PEFT wrappers."""
    current: Any = model
    while True:
        inserted = next((name for name in _INSERTED if name in current._modules), None)
        if type(current).__name__ in ("DistributedDataParallel", "DataParallel"):
            current = current.module
        elif inserted is not None:
            current = current._modules[inserted]
        elif is_peft_model(current):
            current = current.get_base_model()
        else:
            return current


def embeddings_of(model: nn.Module, which: Literal["input", "output"]) -> nn.Module | None:
    """Return the input embeddings or the output head of a transformers model; None where it has or knows none."""
    try:
        found = getattr(base_of(model), f"get_{which}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def clean_name(name: str) -> str:
    """Drop the components that wrappers insert into a dotted name."""
    return ".".join(part for part in name.split(".") if part not in _INSERTED)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield clean names with the outermost module of each name, in definition order, the root left out."""
    seen = {""}
    for name, module in base_of(model).named_modules():
        clean = clean_name(name)
        if clean not in seen:
            seen.add(clean)
            yield clean, module


def find_module(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a clean name, on the outside of any wrapper around it.

    Raises:
        AlignmentError: no module has this name.
    """
    current = base_of(model)
    for part in name.split(".") if name else ():
        while part not in current._modules:
            inner = next((child for child in _INSERTED if child in current._modules), None)
            if inner is None:
                known = [clean for clean, _ in named_modules(model)]
                raise AlignmentError(
                    f"{type(base_of(model)).__name__} has no module {name!r}.{near_names(name, known)}"
                )
            current = current._modules[inner]  # type: ignore[assignment]
        current = current._modules[part]  # type: ignore[assignment]
    return current
