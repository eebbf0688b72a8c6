"""The user's wish: which devices are the teacher's own, and how it is spread over them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, cast

from silverspoon_kd.distributed.visible_devices import DEVICE_FAMILIES
from silverspoon_kd.errors import PlacementError, near_names

STRATEGIES = ("pp", "tp", "sharded")


@dataclass(frozen=True)
class TeacherPlacement:
    """Devices reserved for the teacher on every node, and how the teacher is spread over them.

    Args:
        teacher_only_devices: Physical device ids as ``nvidia-smi`` shows them (for ``device_type="cpu"``: slots).
            They must be among the devices that this job may use.
        strategy: ``"pp"`` (layers spread over the devices), ``"tp"`` (tensor parallel) or ``"sharded"`` (FSDP over the
            teacher's devices only).
        device_type: ``"cuda"`` (also ROCm), ``"npu"``, ``"xpu"`` or ``"cpu"``. None means ``"cuda"``.
        wrap_cls: Module class name or names that FSDP wraps (``strategy="sharded"`` only). None: the model's
            ``_no_split_modules``, else by size.

    Raises:
        PlacementError: A value is of the wrong type or unknown, or an id is given twice.
    """

    teacher_only_devices: list[int] = field(default_factory=list)
    strategy: str = "pp"
    device_type: str | None = None
    wrap_cls: str | list[str] | None = None

    def __post_init__(self) -> None:
        values = {
            "teacher_only_devices": _checked_ids(self.teacher_only_devices),
            "strategy": _checked_strategy(self.strategy),
            "device_type": _checked_device_type(self.device_type),
            "wrap_cls": _checked_wrap_cls(self.wrap_cls, self.strategy),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the class is frozen for everybody else

    def __copy__(self) -> "TeacherPlacement":
        return replace(self)  # two placements never share a list

    @property
    def resolved_device_type(self) -> str:
        """The device type with the default filled in."""
        return self.device_type or "cuda"

    @staticmethod
    def from_value(value: object) -> "PlacementValue":
        """Turn every accepted form of ``teacher_placement`` into one of three.

        Args:
            value: None, ``"replicated"``, ``"sharded"``, a placement, a dict of its fields, or that dict as JSON text.

        Returns:
            ``"replicated"`` (also for None), ``"sharded"`` or a `TeacherPlacement`.

        Raises:
            PlacementError: The value is none of these.
        """
        if value is None:
            return "replicated"
        if isinstance(value, TeacherPlacement):
            return value
        if isinstance(value, Mapping):
            return _from_mapping(value)
        if isinstance(value, str):
            return _from_text(value)
        raise PlacementError(f"teacher_placement={value!r} is a {type(value).__name__}. Give {_ACCEPTED}.")


PlacementValue: TypeAlias = Literal["replicated", "sharded"] | TeacherPlacement

_ACCEPTED = "None, 'replicated', 'sharded', a TeacherPlacement, or a dict (or its JSON text) of the fields of one"


def _from_mapping(value: Mapping[Any, Any]) -> TeacherPlacement:
    known = [f.name for f in fields(TeacherPlacement)]
    for key in value:
        if key not in known:
            hint = near_names(str(key), known)
            raise PlacementError(f"teacher_placement has no field {key!r}.{hint} The fields are {', '.join(known)}.")
    return TeacherPlacement(**value)


def _from_text(text: str) -> PlacementValue:
    word = text.strip()
    if word in ("replicated", "sharded"):
        return cast(PlacementValue, word)
    if word in STRATEGIES:
        raise PlacementError(
            f"teacher_placement={text!r} needs devices of its own. Give "
            f"TeacherPlacement(teacher_only_devices=[...], strategy={word!r})."
        )
    if not word.startswith("{"):
        raise PlacementError(
            f"teacher_placement={text!r} is unknown.{near_names(word, ('replicated', 'sharded'))} Give {_ACCEPTED}."
        )
    try:
        value = json.loads(word)
    except json.JSONDecodeError as error:
        raise PlacementError(f"teacher_placement={text!r} is not valid JSON: {error}.") from error
    return _from_mapping(value)


def _checked_ids(ids: object) -> list[int]:
    if not isinstance(ids, (list, tuple, range)):
        raise PlacementError(f"teacher_only_devices={ids!r} is a {type(ids).__name__}. Give a list of ids like [0, 1].")
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise PlacementError(
                f"teacher_only_devices={ids!r} contains {item!r}. Give ids as whole numbers from 0, like [0, 1]."
            )
    # int() turns subclasses, such as an IntEnum, into plain numbers that print as numbers.
    plain = [int(item) for item in ids]
    for item in plain:
        if plain.count(item) > 1:
            raise PlacementError(f"teacher_only_devices={ids!r} contains {item} more than once. Give each id once.")
    return plain


def _checked_strategy(strategy: str) -> str:
    if strategy not in STRATEGIES:
        hint = near_names(str(strategy), STRATEGIES)
        raise PlacementError(f"strategy={strategy!r} is unknown.{hint} Give 'pp', 'tp' or 'sharded'.")
    return strategy


def _checked_device_type(device_type: object) -> str | None:
    if device_type is None:
        return None
    name = device_type.lower() if isinstance(device_type, str) else repr(device_type)
    if name not in DEVICE_FAMILIES:
        known = ", ".join(repr(known) for known in DEVICE_FAMILIES)
        raise PlacementError(
            f"device_type={device_type!r} is not supported. Give one of {known} (ROCm is 'cuda'), or None for 'cuda'."
        )
    return name


def _checked_wrap_cls(wrap_cls: object, strategy: str) -> str | list[str] | None:
    names = [wrap_cls] if isinstance(wrap_cls, str) else wrap_cls
    if names is None or names == [] or names == ():
        return None
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise PlacementError(f"wrap_cls={wrap_cls!r} is neither a class name nor a list of class names.")
    if strategy != "sharded":
        raise PlacementError(
            f"wrap_cls={wrap_cls!r} says what FSDP wraps, but strategy={strategy!r} does not use FSDP. "
            "Leave wrap_cls out, or use strategy='sharded'."
        )
    return wrap_cls if isinstance(wrap_cls, str) else list(names)
