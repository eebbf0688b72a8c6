"""A teacher from whatever the user gives: a module, a model id or folder, or a callable that builds it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from silverspoon_kd.errors import ConfigurationError, TeacherError

logger = logging.getLogger(__name__)


def load_model(source: nn.Module | str | Callable[[], nn.Module], role: str) -> nn.Module:
    """Return the model, out of the ``torch.compile`` around it: hooks would have it compiled anew in every step.

    Args:
        source: a module, a model id or folder for ``from_pretrained``, or a callable without arguments.
        role: "teacher" or "student", for messages.

    Raises:
        ConfigurationError: ``source`` is none of these.
        TeacherError: loading failed.
    """
    if isinstance(source, nn.Module):
        return _uncompiled(source, role)
    if isinstance(source, str):
        return _from_pretrained(source, role)
    if callable(source):
        model = source()
        if isinstance(model, nn.Module):
            return _uncompiled(model, role)
        raise TeacherError(f"The callable given as {role}_model returned a {type(model).__name__}, not a torch module.")
    raise ConfigurationError(
        f"{role}_model is a {type(source).__name__}. Pass a torch module, a model id or folder, or a callable that "
        "builds the module."
    )


def _uncompiled(model: nn.Module, role: str) -> nn.Module:
    inner = model._modules.get("_orig_mod")
    if inner is None:
        return model
    logger.warning(
        "The %s is compiled. Graphs do not run the hooks that record activations, so the %s inside is used as it is.",
        role,
        type(inner).__name__,
    )
    return inner


@dataclass(frozen=True)
class Described:
    """What is known of a model before it is loaded: its class and its config."""

    model_class: Any
    config: Any


def describe_model(name: str, role: str) -> Described:
    """Read the config of a model id or folder.

    Raises:
        TeacherError: there is none.
    """
    import transformers

    with _clear_errors(name, role):
        config: Any = transformers.AutoConfig.from_pretrained(name)
    architecture = (config.architectures or [""])[0] or ""
    return Described(getattr(transformers, architecture, transformers.AutoModelForCausalLM), config)


def _from_pretrained(name: str, role: str) -> nn.Module:
    described = describe_model(name, role)
    with _clear_errors(name, role):
        return described.model_class.from_pretrained(name)


@contextmanager
def _clear_errors(name: str, role: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise TeacherError(f"The {role} {name!r} cannot be loaded: {error}") from error
