"""Whether two models can be given the same token ids."""

import logging
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from silverspoon_kd.capture import base_of
from silverspoon_kd.errors import ConfigurationError

logger = logging.getLogger(__name__)

# Vocabularies of one tokenizer differ by the padding of their embeddings; more than this is another tokenizer.
_MAX_PADDING = 1024


def check_vocabularies(student: nn.Module, other: int | None) -> None:
    """Refuse models whose vocabularies differ by more than padding.

    Args:
        student: the student.
        other: size of the teacher's vocabulary; None: unknown.

    Raises:
        ConfigurationError: they do.
    """
    own = getattr(getattr(base_of(student), "config", None), "vocab_size", None)
    if not (isinstance(own, int) and isinstance(other, int)):
        return
    if abs(own - other) > _MAX_PADDING or 2 * min(own, other) < max(own, other):
        raise ConfigurationError(
            f"The student's vocabulary has {own} entries and the teacher's {other}: these are different tokenizers, "
            "and both models get the same ids. Use models of one tokenizer, or map the ids with prepare_teacher_inputs."
        )
    if own != other:
        logger.warning(
            "The student's vocabulary has %d entries and the teacher's %d: taken for padding of one tokenizer. "
            "Logits are compared on the common %d.",
            own,
            other,
            min(own, other),
        )


def check_tokenizers(student: Any, teacher: nn.Module | str) -> None:
    """Compare token strings where both tokenizers are at hand: the student's, and the one beside the teacher's weights.

    Args:
        student: the ``processing_class`` given by the user; anything but a tokenizer is not checked.
        teacher: the teacher, or its folder; its tokenizer is looked for on this machine only, never downloaded.

    Raises:
        ConfigurationError: an id means different tokens.
    """
    config = None if isinstance(teacher, str) else getattr(base_of(teacher), "config", None)
    source = teacher if isinstance(teacher, str) else getattr(config, "_name_or_path", "")
    if not isinstance(student, PreTrainedTokenizerBase) or not source or source == student.name_or_path:
        return
    try:
        other = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError):
        return
    special = {*student.all_special_ids, *other.all_special_ids}
    tokens = {index: token for token, index in other.get_vocab().items()}
    for token, index in sorted(student.get_vocab().items(), key=lambda item: item[1]):
        if index in tokens and tokens[index] != token and index not in special:
            raise ConfigurationError(
                f"The id {index} is {token!r} in the student's tokenizer and {tokens[index]!r} in the teacher's, so "
                "the two models would read different texts. Use models of one tokenizer, or map the ids with "
                "prepare_teacher_inputs."
            )
