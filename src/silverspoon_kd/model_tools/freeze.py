"""Freeze parameters by name."""

import logging
import re
from collections.abc import Sequence

from torch import nn

from silverspoon_kd.errors import ConfigurationError, near_names

logger = logging.getLogger(__name__)


def freeze_parameters(
    model: nn.Module, freeze_regex_patterns: str | Sequence[str], thaw_not_matched: bool = False
) -> list[str]:
    """Freeze every parameter whose whole name matches one of the patterns.

    Args:
        model: Changed in place.
        freeze_regex_patterns: A regular expression or a list of them, such as ``r"model\\.embed_tokens\\..*"``.
        thaw_not_matched: Make all other floating-point parameters trainable; else they stay as they are.

    Returns:
        The names of the frozen parameters. A tied parameter is frozen if one of its names matches.

    Raises:
        ConfigurationError: A pattern is no regular expression or matches nothing.
    """
    patterns = [freeze_regex_patterns] if isinstance(freeze_regex_patterns, str) else list(freeze_regex_patterns)
    named = list(model.named_parameters(remove_duplicate=False))
    matched = {name for pattern in patterns for name in _matches(pattern, [name for name, _ in named])}
    frozen = {id(parameter) for name, parameter in named if name in matched}
    for _, parameter in named:
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
        elif thaw_not_matched and parameter.is_floating_point():
            parameter.requires_grad_(True)
    names = [name for name, _ in named if name in matched]
    logger.info("Froze %d of %d parameters.", len(frozen), len({id(parameter) for _, parameter in named}))
    return names


def _matches(pattern: str, names: Sequence[str]) -> list[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(f"{pattern!r} is no regular expression: {error}.") from error
    found = [name for name in names if compiled.fullmatch(name)]
    if found:
        return found
    inside = [name for name in names if compiled.match(name)]
    hint = (
        f" It matches only the beginning of {inside[0]!r}; add '.*' for everything below."
        if inside
        else near_names(pattern.replace("\\", ""), names)
    )
    raise ConfigurationError(
        f"{pattern!r} must match a whole parameter name, but none of the {len(names)} names does.{hint}"
    )
