"""What one run of the command line does, read from a YAML file and the options behind it."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from silverspoon_kd.cli.schema import Place, Text, build, convert, entries, refuse_unknown
from silverspoon_kd.errors import ConfigurationError

LAYER_CHOICES = ("even", "first", "last")


@dataclass(frozen=True)
class ModelSource:
    """Where a pretrained model comes from.

    Attributes:
        path: a folder or a model id.
        package: an installed Python package that has a GGUF file among its data.
        gguf_file: the GGUF file in ``path`` or ``package``; needed where there are several.
    """

    path: str | None = None
    package: str | None = None
    gguf_file: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.package is None):
            raise ConfigurationError("a model needs either 'path' (a folder or model id) or 'package'. Give one.")


@dataclass(frozen=True)
class StudentSource:
    """A student cut from the teacher, or a model of its own.

    Attributes:
        layers: how many of the teacher's layers are copied, or their numbers, from 0.
        choose: which ones: "even" (evenly spaced, the first and the last among them), "first" or "last".
        path: a folder or a model id instead.
    """

    layers: int | list[int] | None = None
    choose: Literal["even", "first", "last"] = "even"
    path: str | None = None

    def __post_init__(self) -> None:
        if (self.layers is None) == (self.path is None):
            raise ConfigurationError(
                "a student needs either 'layers' (cut from the teacher) or 'path' (a folder or model id). "
                "Give one of them."
            )


@dataclass(frozen=True)
class DataSource:
    """Text to train on and text to judge by.

    Attributes:
        source: "python-topics", or a .txt, .jsonl or .parquet file.
        column: the text column of a .jsonl or .parquet file.
        block_size: tokens in a training example.
        held_out: share of the text that is kept for the perplexity, by whole documents.
        seed: draws the held-out documents.
    """

    source: str = "python-topics"
    column: str = "text"
    block_size: int = 256
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ConfigurationError(f"block_size={self.block_size} leaves nothing to predict. Give 2 or more.")
        if not 0 < self.held_out < 1:
            raise ConfigurationError(f"held_out={self.held_out} is not a share between 0 and 1.")


@dataclass(frozen=True)
class AlignmentSource:
    """One call of ``create_alignments``: its keywords, without the models.

    ``modules`` can also be "even", "first" or "last": the decoder layers, mapped by ``layer_map``.
    """

    modules: str | list[str] | dict[str, str]
    loss_function: str | None = None
    loss_function_kwargs: dict[str, Any] | None = None
    output_selector_index: int | None = None
    auto_projector: bool = True
    projector_init: str | None = None
    max_grad_norm: float | None = None
    loss_weight: float = 1.0
    learning_rate: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class RunConfig:
    """Everything in the YAML file.

    Attributes:
        teacher: model id or folder, or a :class:`ModelSource`.
        student: the student.
        distiller: name of the distiller.
        data: the text.
        alignments: for holistic and blockwise distillation.
        soft_loss_fn: for response-based distillation; default: the distiller's.
        soft_loss_fn_kwargs: its arguments.
        baseline: "text-only" also trains the same student on the text alone, for comparison.
        training: fields of ``TrainingArguments``.
    """

    teacher: str | ModelSource
    student: StudentSource
    distiller: Literal["holistic", "hkd", "blockwise", "bkd", "response_based", "reskd"] = "holistic"
    data: DataSource = field(default_factory=DataSource)
    alignments: list[AlignmentSource] = field(default_factory=list)
    soft_loss_fn: str | None = None
    soft_loss_fn_kwargs: dict[str, Any] | None = None
    baseline: Literal["text-only"] | None = None
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.response_based and self.alignments:
            raise ConfigurationError(
                "response-based distillation compares the logits and takes no 'alignments'. Remove them, or use "
                "distiller: holistic."
            )
        if not self.response_based and not self.alignments:
            raise ConfigurationError(
                f"distiller {self.distiller!r} needs 'alignments'. Add for example: alignments: "
                "[{modules: even, loss_function: normalized_mse}]."
            )
        if not self.response_based and self.soft_loss_fn is not None:
            raise ConfigurationError(
                "'soft_loss_fn' belongs to response-based distillation. Set 'loss_function' in an alignment."
            )

    @property
    def response_based(self) -> bool:
        """Whether only the logits are compared."""
        return self.distiller in ("response_based", "reskd")


def load_config(file: Path, options: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and the options that override it.

    Args:
        file: the YAML file.
        options: ``["--key", "value", "--key=value", ...]``; a key is a field of ``TrainingArguments`` or a dotted path
            into the YAML file, such as ``data.block_size`` or ``alignments.0.loss_weight``.

    Raises:
        ConfigurationError: the file cannot be read, a key is unknown, or a value does not fit.
    """
    values = read_yaml(file)
    overrides = _parse_options(options, training_hints())
    for path, value in overrides.items():
        _set(values, path.split("."), value, path)
    place = Place(str(file), overridden=frozenset(overrides))
    return build(RunConfig, {**values, "training": _check_training(values, place)}, place)


def training_hints() -> dict[str, Any]:
    """Return the types of the fields of ``TrainingArguments``."""
    import typing

    from silverspoon_kd import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    return {item.name: hints[item.name] for item in dataclasses.fields(TrainingArguments) if item.init}


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigurationError: it cannot be read, is no YAML, has a key twice, or holds no mapping.
    """
    try:
        values = yaml.load(file.read_text("utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is no UTF-8 text: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file} is no valid YAML: {' '.join(str(error).split())}.") from error
    return entries({} if values is None else values, Place(str(file)))


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader would silently keep the last of two equal keys."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1 and key != "<<":
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands there twice", node.start_mark)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _check_training(values: Mapping[str, Any], place: Place) -> dict[str, Any]:
    place = place.key("training")
    hints = training_hints()
    checked = {}
    given = values.get("training")
    for name, value in entries({} if given is None else given, place).items():
        if name not in hints:
            refuse_unknown(name, hints, place)
        checked[name] = convert(value, hints[name], place.key(name))
    return checked


def _parse_options(options: Sequence[str], hints: Mapping[str, Any]) -> dict[str, Text]:
    top_level = [item.name for item in dataclasses.fields(RunConfig)]
    parsed: dict[str, Text] = {}
    remaining = list(options)
    while remaining:
        option = remaining.pop(0)
        if not re.fullmatch(r"--[A-Za-z][\w.-]*(=.*)?", option, re.DOTALL):
            raise ConfigurationError(f"{option!r} is no option. Write --key value or --key=value.")
        name, assigned, text = option[2:].partition("=")
        name = name.replace("-", "_")
        if not assigned:
            # A switch without a value, like --bf16, means true.
            text = remaining.pop(0) if remaining and not remaining[0].startswith("--") else "true"
        first = name.split(".")[0]
        if first not in top_level:
            if first not in hints:
                refuse_unknown(name, [*top_level, *hints], Place("", overridden=frozenset({name})))
            name = f"training.{name}"
        parsed[name] = Text(text)
    return parsed


def _set(values: dict[str, Any], path: Sequence[str], value: Text, dotted: str) -> None:
    target: Any = values
    for key in path[:-1]:
        if isinstance(target, list):
            target = target[_index(key, target, dotted)]
            continue
        if target.get(key) is None:
            target[key] = {}
        target = target[key]
        if not isinstance(target, dict | list):
            raise ConfigurationError(f"--{dotted} cannot be set: {key!r} is {target!r} in the file, not a mapping.")
    if isinstance(target, list):
        target[_index(path[-1], target, dotted)] = value
    else:
        target[path[-1]] = value


def _index(key: str, values: Sequence[Any], dotted: str) -> int:
    if not key.isdigit() or int(key) >= len(values):
        raise ConfigurationError(
            f"--{dotted} cannot be set: {key!r} is no entry of a list with {len(values)} entries, numbered from 0."
        )
    return int(key)
