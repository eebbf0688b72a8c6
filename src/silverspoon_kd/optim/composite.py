"""Several torch optimizers behind the interface of one."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch.optim import Optimizer

from silverspoon_kd.errors import CheckpointError, ConfigurationError, near_names

_TAGS = ("alignment", "decay", "projector")

# Arguments by which some optimizers of transformers bring parameter groups of their own (GaLore, APOLLO, LOMO).
_OWN_GROUPS = ("params", "model", "optimizer_dict")


class _MergedState(MutableMapping[torch.Tensor, Any]):
    """The per-parameter state of several optimizers, read and written where it lives."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _owner(self, key: Any) -> Optimizer:
        for optimizer in self._optimizers:
            if key in optimizer.state or any(key is p for group in optimizer.param_groups for p in group["params"]):
                return optimizer
        raise KeyError(key)

    def __getitem__(self, key: Any) -> Any:
        return self._owner(key).state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._owner(key).state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._owner(key).state[key]

    def __contains__(self, key: object) -> bool:
        return any(key in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(optimizer.state for optimizer in self._optimizers)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


@final
class CompositeOptimizer(Optimizer):
    """One optimizer made of several, each with parameters of its own.

    ``param_groups`` are the very dicts of the members, one member after the other, so learning-rate schedules, gradient
    scalers and wrappers that exchange parameters act on the members. ``state_dict`` has torch's usual layout.

    Args:
        optimizers: At least one optimizer; no parameter may be in two of them.

    Raises:
        ConfigurationError: There is no optimizer, or two share a parameter.
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise ConfigurationError("A composite optimizer needs at least one optimizer, but none was given.")
        seen: set[int] = set()
        for optimizer in optimizers:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if own & seen:
                raise ConfigurationError(
                    f"{len(own & seen)} parameters are in two of the {len(optimizers)} optimizers and would be stepped "
                    "twice. Give every parameter to one optimizer."
                )
            seen |= own
        # Optimizer.__init__ would build groups and state of its own; __setstate__ prepares only what torch needs.
        self.__setstate__({"optimizers": tuple(optimizers)})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "defaults": dict(state["optimizers"][0].defaults)})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members, the same dict objects, in the order of the members."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for optimizer, part in zip(self.optimizers, self._parts(groups), strict=True):
            optimizer.param_groups = part

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:  # type: ignore[override]
        """A live view of the state of all members."""
        return _MergedState(self.optimizers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: nobody could say which member should take the group."""
        raise ConfigurationError(
            f"A group of {len(list(param_group.get('params', ())))} parameters cannot be added to a composite of "
            f"{len(self.optimizers)} optimizers. Pass every group when the optimizer is built."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all members."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member once; ``closure`` is evaluated once, before the first of them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
            if not optimizer.state:
                # Sharded checkpoints of torch ask for an entry per parameter as soon as any parameter has one.
                for group in optimizer.param_groups:
                    optimizer.state.update({parameter: {} for parameter in group["params"]})
        return loss

    def train(self) -> None:
        """Switch members that have modes (schedule-free optimizers) to training."""
        self._switch("train")

    def eval(self) -> None:
        """Switch members that have modes (schedule-free optimizers) to evaluation."""
        self._switch("eval")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, each member its own part.

        Raises:
            CheckpointError: The saved groups are not those of this optimizer.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        saved = check_saved_groups(self, state_dict)
        for optimizer, groups in zip(self.optimizers, self._parts(saved["param_groups"]), strict=True):
            keys = {key for group in groups for key in group["params"]}
            state = {key: value for key, value in saved["state"].items() if key in keys}
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _parts(self, groups: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        counts = [len(optimizer.param_groups) for optimizer in self.optimizers]
        if sum(counts) != len(groups):
            raise ConfigurationError(f"{len(groups)} groups were given to an optimizer that has {sum(counts)}.")
        rest = iter(groups)
        return [[next(rest) for _ in range(count)] for count in counts]

    def _switch(self, mode: str) -> None:
        for optimizer in self.optimizers:
            switch = getattr(optimizer, mode, None)
            if callable(switch):
                switch()


@torch.no_grad()
def fill_state(optimizer: Optimizer) -> bool:
    """Give every parameter its state, with a step that changes nothing.

    Sharded loading of torch needs the state as a template, and makes it only for an optimizer that has none at all: one
    member of several (Adagrad) has it from the start.

    Returns:
        Whether there is any: plain SGD keeps none.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    members = inner.optimizers if isinstance(inner, CompositeOptimizer) else [inner]
    for member in members:
        if member.state:
            continue
        rates = [group["lr"] for group in member.param_groups]
        for group in member.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        member.step()
        member.zero_grad(set_to_none=True)
        for group, rate in zip(member.param_groups, rates, strict=True):
            group["lr"] = rate
    return any(values for member in members for values in member.state.values())


def check_saved_groups(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Compare saved parameter groups with those of ``optimizer``; torch itself only counts them.

    Loading replaces the groups' values, tags included. Tags that a saved group lacks are filled in, so that learning
    rates and clipping keep their alignments.

    Returns:
        A copy of ``state_dict`` whose groups carry all tags.

    Raises:
        CheckpointError: The number of groups, a group's alignment or its number of parameters differs.
    """
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    if len(groups) != len(saved):
        raise CheckpointError(
            f"The saved optimizer has {len(saved)} parameter groups ({_alignments(saved)}), but this run has "
            f"{len(groups)} ({_alignments(groups)}). Resume with the alignments of the saved run."
        )
    filled = []
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        tags = {tag: group[tag] for tag in _TAGS if tag in group}
        if any(other.get(tag, value) != value for tag, value in tags.items()):
            found = {tag: other.get(tag) for tag in tags}
            raise CheckpointError(
                f"Parameter group {index} was saved for {found}, but here it is {tags}. "
                "Resume with the alignments of the saved run."
            )
        if len(group["params"]) != len(other["params"]):
            raise CheckpointError(
                f"Parameter group {index} ({group.get('alignment')!r}) was saved with {len(other['params'])} "
                f"parameters, but here it has {len(group['params'])}. Resume with the same modules frozen and aligned."
            )
        filled.append({**other, **tags})
    return {**state_dict, "param_groups": filled}


def torch_optimizer(name: str, defaults: Mapping[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """Find the class behind an optimizer name of transformers that needs nothing but torch and transformers.

    Args:
        name: ``adamw_torch``, ``adamw_torch_fused``, ``sgd``, ``adagrad``, ``rmsprop`` or ``adafactor``.
        defaults: Keyword arguments of the run's default optimizer; Adam's betas and eps are taken from here.

    Raises:
        ConfigurationError: The name is another one.
    """
    adam = {key: defaults[key] for key in ("betas", "eps") if "betas" in defaults and key in defaults}
    known: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
        "adamw_torch": (torch.optim.AdamW, adam),
        "adamw_torch_fused": (torch.optim.AdamW, {**adam, "fused": True}),
        "sgd": (torch.optim.SGD, {}),
        "adagrad": (torch.optim.Adagrad, {}),
        "rmsprop": (torch.optim.RMSprop, {}),
    }
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor, {"scale_parameter": False, "relative_step": False}
    if name not in known:
        raise ConfigurationError(
            f"optimizer={name!r} was asked, but the names known here are {sorted([*known, 'adafactor'])}."
            f"{near_names(name, [*known, 'adafactor'])} Pass factory(param_groups) -> Optimizer for any other."
        )
    return known[name]


def build_optimizer(
    groups: Sequence[dict[str, Any]],
    default: tuple[type[Optimizer], dict[str, Any]],
    named: Mapping[str, str | Callable[..., Optimizer]],
    *,
    resolve: Callable[[str, Mapping[str, Any]], tuple[type[Optimizer], dict[str, Any]]] = torch_optimizer,
) -> Optimizer:
    """Build the run's optimizer: one of torch where all alignments use the default, else a composite.

    Args:
        groups: Result of :func:`~silverspoon_kd.optim.groups.build_parameter_groups`.
        default: Class and keyword arguments of the run's default optimizer.
        named: Alignment name -> optimizer name or ``factory(param_groups) -> Optimizer``.
        resolve: ``(name, default keyword arguments) -> (class, keyword arguments)``.

    Raises:
        ConfigurationError: There is nothing to train, or an optimizer is unknown or drops its groups.
    """
    if not groups:
        raise ConfigurationError(
            "No parameter is trainable, so there is nothing to optimize. Thaw a part of the student or add a projector."
        )
    used = dict.fromkeys(group["alignment"] for group in groups)
    # Same name, same arithmetic: those alignments share one optimizer. A factory may keep state over all its
    # parameters, so each alignment gets its own.
    wishes = {
        name: ("shared", named[name]) if isinstance(named[name], str) else ("own", name)
        for name in used
        if name in named
    }
    members = []
    rest = [group for group in groups if group["alignment"] not in wishes]
    if rest:
        members.append(_from_class(default, rest))
    for wish in dict.fromkeys(wishes.values()):
        names = [name for name, value in wishes.items() if value == wish]
        own = [group for group in groups if group["alignment"] in names]
        maker = named[names[0]]
        if isinstance(maker, str):
            members.append(_from_class(resolve(maker, default[1]), own))
        else:
            members.append(_from_factory(maker, own, names[0]))
    if len(members) > 1:
        return CompositeOptimizer(members)
    members[0].register_load_state_dict_pre_hook(check_saved_groups)
    return members[0]


def _from_class(maker: tuple[type[Optimizer], dict[str, Any]], groups: list[dict[str, Any]]) -> Optimizer:
    cls, kwargs = maker
    own = [key for key in _OWN_GROUPS if key in kwargs]
    if own or not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise ConfigurationError(
            f"{getattr(cls, '__name__', cls)!r} chooses its parameter groups itself ({own or 'no Optimizer class'}), "
            "so rates and clipping per alignment cannot reach it. Use one that takes groups, such as 'adamw_torch'."
        )
    return cls(groups, **kwargs)


def _from_factory(factory: Callable[..., Optimizer], groups: list[dict[str, Any]], name: str) -> Optimizer:
    optimizer = factory(groups)
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"alignment {name!r}: the optimizer factory returned {type(optimizer).__name__}, but a torch Optimizer is "
            "needed. Return one, for example lambda groups: torch.optim.SGD(groups, momentum=0.9)."
        )
    kept = [(group.get("alignment"), [id(p) for p in group["params"]]) for group in optimizer.param_groups]
    if kept != [(group["alignment"], [id(p) for p in group["params"]]) for group in groups]:
        raise ConfigurationError(
            f"alignment {name!r}: the optimizer factory returned an optimizer with other parameter groups than the "
            f"{len(groups)} it was given. Pass them on as they are: lambda groups: torch.optim.SGD(groups, lr=1e-3)."
        )
    return optimizer


def _alignments(groups: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(str(group.get("alignment", "untagged")) for group in groups))
