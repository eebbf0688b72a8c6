"""What a model's forward accepts of a batch."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from silverspoon_kd.capture.names import base_of
from silverspoon_kd.errors import DataError

LABEL_KEYS = ("labels", "label", "label_ids", "start_positions", "end_positions")


class InputView:
    """The part of a batch that one model takes.

    A transformers model gets the columns its forward names, never those that would vanish in its ``**kwargs``; another
    module whose forward is ``(*args, **kwargs)`` gets everything. Labels are passed only on request; the ids of a
    decoder that a model would make from them are made here. Caches of keys and values are switched off by argument, so
    that nobody's config is changed.
    """

    def __init__(self, model: nn.Module, role: str) -> None:
        base = base_of(model)
        parameters = inspect.signature(base.forward).parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        self.role, self.model_name = role, type(base).__name__
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        config = getattr(base, "config", None)
        self.is_transformers = config is not None and callable(getattr(base, "save_pretrained", None))
        variadic = inspect.Parameter.VAR_KEYWORD in kinds
        self.takes_everything = variadic and not (self.is_transformers and self.names)
        self.takes_num_items = "num_items_in_batch" in self.names or (variadic and self.is_transformers)
        caches = self.is_transformers and hasattr(config, "use_cache")
        self._shift = getattr(base, "prepare_decoder_input_ids_from_labels", None)
        self._fixed = {"use_cache": False} if caches and (variadic or "use_cache" in self.names) else {}

    @property
    def shifts_labels(self) -> bool:
        """Whether the ids of the model's decoder are made of the labels."""
        return self._shift is not None

    def __call__(self, batch: Mapping[str, Any], *, with_labels: bool = False) -> dict[str, Any]:
        """Return the keyword arguments for this model.

        Raises:
            DataError: the forward accepts nothing of the batch.
        """
        allowed = [key for key in batch if self.takes_everything or key in self.names]
        inputs = {key: batch[key] for key in allowed if with_labels or key not in LABEL_KEYS}
        if not any(key not in LABEL_KEYS for key in inputs):
            raise DataError(
                f"The {self.role} {self.model_name} takes {', '.join(self.names)}, but a batch has only "
                f"{', '.join(batch)}. Rename the columns, or map them with prepare_{self.role}_inputs."
            )
        if self._shift is not None and batch.get("labels") is not None and not _has_decoder_inputs(batch):
            inputs["decoder_input_ids"] = self._shift(batch["labels"])
        return {**inputs, **{key: value for key, value in self._fixed.items() if key not in inputs}}


def _has_decoder_inputs(batch: Mapping[str, Any]) -> bool:
    return any(batch.get(key) is not None for key in ("decoder_input_ids", "decoder_inputs_embeds"))
