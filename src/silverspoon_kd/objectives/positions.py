"""Which positions of a batch count, and how many there are.

Every loss term is a sum over positions divided once by their number in the whole step: over all micro-batches of an
accumulation window and over all ranks. The units a term can be counted in:

======================  ====================================================================================
``rows``                rows of the batch, for features without a token axis (images, pooled outputs)
``tokens``              positions with ``attention_mask == 1``
``decoder_tokens``      the same on the decoder side of an encoder-decoder model
``targets``             positions whose label is not -100 (shifted by one for causal models), tokens without labels
``task``                labels that the student's own loss counts
======================  ====================================================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from silverspoon_kd.capture import base_of
from silverspoon_kd.errors import DataError
from silverspoon_kd.tree import tensors_in

UNITS = ("rows", "tokens", "decoder_tokens", "targets", "task")


@dataclass(frozen=True)
class Conventions:
    """How a student relates labels to positions."""

    shifts_labels: bool
    encoder_decoder: bool


@dataclass(frozen=True)
class Positions:
    """The masks of one batch, bool ``[batch, length]``; a unit without a mask is absent."""

    rows: int
    masks: dict[str, Tensor]
    num_task: Tensor

    def counts(self) -> Tensor:
        """Return how many positions each of :data:`UNITS` has, int64 ``[5]`` on the batch's device."""
        zero = torch.zeros((), dtype=torch.int64, device=self.num_task.device)
        found = {"rows": zero + self.rows, "task": self.num_task}
        found |= {unit: mask.sum() for unit, mask in self.masks.items()}
        return torch.stack([found.get(unit, zero) for unit in UNITS])


def conventions_of(student: nn.Module) -> Conventions:
    """Read off a transformers model whether its loss shifts the labels; other modules do not shift."""
    base = base_of(student)
    encoder_decoder = bool(getattr(getattr(base, "config", None), "is_encoder_decoder", False))
    causal = getattr(base, "loss_type", None) == "ForCausalLM" or type(base).__name__.endswith("LMHeadModel")
    return Conventions(shifts_labels=causal and not encoder_decoder, encoder_decoder=encoder_decoder)


def positions_of(batch: Mapping[str, Any], conventions: Conventions) -> Positions:
    """Return what counts in a batch: ``input_ids``, ``attention_mask`` ``[batch, length]``, ``labels``.

    Raises:
        DataError: there is no tensor in the batch.
    """
    first = batch.get("input_ids")
    if not isinstance(first, Tensor):
        first = next((tensor for tensor in tensors_in(batch) if tensor.dim() > 0), None)
    if first is None:
        raise DataError(f"A batch with the keys {sorted(batch)} holds no tensor. Check the data collator.")
    masks: dict[str, Tensor] = {}
    tokens = _token_mask(batch, "attention_mask", "input_ids")
    if tokens is not None:
        masks["tokens"] = tokens
    labels = batch.get("labels")
    label_mask = _label_mask(labels, conventions.shifts_labels)
    if conventions.encoder_decoder:
        decoder = _decoder_mask(batch, label_mask)
        masks |= {} if decoder is None else {"decoder_tokens": decoder}
    base = masks.get("decoder_tokens" if conventions.encoder_decoder else "tokens")
    if label_mask is not None and label_mask.dim() == 2:
        masks["targets"] = _within(label_mask, base, conventions.shifts_labels)
    elif base is not None:
        masks["targets"] = base
    num_task = first.new_full((), len(first), dtype=torch.int64) if label_mask is None else label_mask.sum()
    return Positions(rows=len(first), masks=masks, num_task=num_task)


def _token_mask(batch: Mapping[str, Any], mask_key: str, ids_key: str) -> Tensor | None:
    mask, ids = batch.get(mask_key), batch.get(ids_key)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask != 0
    if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
        return torch.ones_like(ids, dtype=torch.bool)
    return None


def _decoder_mask(batch: Mapping[str, Any], label_mask: Tensor | None) -> Tensor | None:
    """Return the decoder's own mask. Collators for translation make none: there the labels tell where padding is."""
    if label_mask is not None and not isinstance(batch.get("decoder_attention_mask"), Tensor):
        return label_mask
    return _token_mask(batch, "decoder_attention_mask", "decoder_input_ids")


def _label_mask(labels: Any, shifts: bool) -> Tensor | None:
    """Return where a label counts, at the position whose output predicts it."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    valid = labels != -100
    if not shifts or labels.dim() != 2:
        return valid
    last = torch.zeros_like(valid[:, :1])
    return torch.cat([valid[:, 1:], last], dim=1)


def _within(targets: Tensor, tokens: Tensor | None, shifts: bool) -> Tensor:
    """Drop padding from the targets: labels copied from the inputs are often not set to -100 there."""
    if tokens is None or tokens.shape != targets.shape:
        return targets
    if not shifts:
        return targets & tokens
    following = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)
    return targets & tokens & following
