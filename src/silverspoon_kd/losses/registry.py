"""Losses by name."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from silverspoon_kd.errors import LossError, near_names
from silverspoon_kd.losses.base import Loss
from silverspoon_kd.losses.callable_loss import CallableLoss, signature_of

Registered = TypeVar("Registered", bound=Callable[..., Any])


@dataclass(frozen=True)
class LossRecord:
    """What is known of a registered loss.

    Attributes:
        name: what :func:`get_loss_function` takes.
        aliases: other names of the same loss.
        summary: the first line of its description.
        defaults: its hyperparameters that have a default, and the default.
    """

    name: str
    aliases: tuple[str, ...]
    summary: str
    defaults: Mapping[str, Any]


@dataclass(frozen=True)
class _Entry:
    record: LossRecord
    factory: Callable[..., Any]


_entries: dict[str, _Entry] = {}  # by name
_names: dict[str, str] = {}  # name of each name and alias


def register_loss(name: str, *aliases: str) -> Callable[[Registered], Registered]:
    """Return a decorator that makes a loss known by its name.

    It takes a :class:`Loss` subclass; a function of two required arguments, ``(student, teacher) -> scalar``, further
    ones with defaults being its hyperparameters; or any other function as a factory, which gets the hyperparameters
    and returns a loss.

    Raises:
        LossError: the name or an alias is taken.
    """

    def register(loss: Registered) -> Registered:
        for wanted in (name, *aliases):
            if wanted in _names:
                raise LossError(f"The loss name {wanted!r} is taken by {_names[wanted]!r}. Choose another name.")
        factory: Callable[..., Any] = loss
        if isinstance(loss, type) and issubclass(loss, Loss):
            loss.name = name
        elif _compares_two_tensors(loss):
            factory = _binder_of(loss)
        _entries[name] = _Entry(LossRecord(name, aliases, _summary(loss), _defaults(factory)), factory)
        _names.update(dict.fromkeys((name, *aliases), name))
        return loss

    return register


def available_losses() -> list[LossRecord]:
    """Return a record of each registered loss, sorted by name."""
    return [_entries[name].record for name in sorted(_entries)]


def get_loss_function(loss: str | Loss | Callable[..., Any], **kwargs: Any) -> Loss:
    """Return a loss.

    Args:
        loss: a registered name or alias; a function ``(student, teacher) -> scalar``, student first (see
            :class:`CallableLoss`); a :class:`Loss` class; or a loss, which is returned as it is.
        **kwargs: hyperparameters. For a function they are bound as its keyword arguments; ``positions="targets"``
            marks it as a loss on logits, unless the function has a parameter of this name.

    Raises:
        LossError: the name or a keyword argument is unknown, or a value cannot be used.
    """
    if isinstance(loss, str):
        return _build(loss, _entry(loss).factory, kwargs)
    if isinstance(loss, Loss):
        if kwargs:
            raise LossError(f"{loss!r} is built already and takes no keyword arguments, but got {sorted(kwargs)}.")
        return loss
    if isinstance(loss, type) and issubclass(loss, Loss):
        return _build(loss.__name__, loss, kwargs)
    return _wrap(loss, kwargs)


def _entry(name: str) -> _Entry:
    if name not in _names:
        near = near_names(name.lower().replace("-", "_"), _names)
        raise LossError(f"There is no loss {name!r}.{near} Known are: {', '.join(sorted(_names))}.")
    return _entries[_names[name]]


def _build(name: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> Loss:
    _check_kwargs(name, signature_of(factory), (), kwargs)
    built = factory(**kwargs)
    return built if isinstance(built, Loss) else CallableLoss(built)


def _wrap(function: Any, kwargs: Mapping[str, Any]) -> Loss:
    if not callable(function) or isinstance(function, type):
        return CallableLoss(function)  # which says what is wrong
    signature, options = signature_of(function), dict(kwargs)
    own: dict[str, Any] = {}
    if signature is None or "positions" not in signature.parameters:
        own = {key: options.pop(key) for key in ("positions",) if key in options}
    if options:
        _check_kwargs(getattr(function, "__name__", repr(function)), signature, _tensors(signature), options)
        function = functools.partial(function, **options)
    return CallableLoss(function, **own)


def _tensors(signature: inspect.Signature | None) -> tuple[str, ...]:
    """Name the parameters that stand for tensors: the first two, and the mask."""
    return () if signature is None else (*list(signature.parameters)[:2], "mask")


def _check_kwargs(
    name: str, signature: inspect.Signature | None, reserved: tuple[str, ...], kwargs: Mapping[str, Any]
) -> None:
    if signature is None:
        return
    parameters = signature.parameters.values()
    known = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in reserved
    ]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in kwargs:
        if key in reserved or not (takes_any or key in known):
            accepted = f"Accepted are: {', '.join(known)}." if known else "It takes none."
            raise LossError(f"The loss {name!r} has no keyword argument {key!r}.{near_names(key, known)} {accepted}")
    missing = [p.name for p in parameters if p.name in known and p.default is p.empty and p.name not in kwargs]
    if missing:
        raise LossError(
            f"The loss {name!r} needs the keyword argument {missing[0]!r}. Accepted are: {', '.join(known)}."
        )


def _compares_two_tensors(function: Callable[..., Any]) -> bool:
    signature = signature_of(function)
    leading = list(signature.parameters.values())[:2] if signature else []
    required = [p for p in leading if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    return len(required) == 2


def _binder_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory that binds the function's hyperparameters and shows them as its own signature."""

    def bind(**kwargs: Any) -> Loss:
        return CallableLoss(functools.partial(function, **kwargs))

    signature = signature_of(function)
    if signature is not None:
        hyperparameters = [p for p in signature.parameters.values() if p.name not in _tensors(signature)]
        bind.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=p.KEYWORD_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in hyperparameters]
        )
    return bind


def _defaults(factory: Callable[..., Any]) -> dict[str, Any]:
    signature = signature_of(factory)
    parameters = signature.parameters.values() if signature else ()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _summary(loss: Any) -> str:
    text = inspect.getdoc(loss) or ""
    return text.partition("\n")[0]
