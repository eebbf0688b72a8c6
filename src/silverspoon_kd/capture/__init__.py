"""Activations of a model by module name, through any wrapper."""

from silverspoon_kd.capture.inputs import LABEL_KEYS, InputView
from silverspoon_kd.capture.names import base_of, clean_name, embeddings_of, find_module, is_peft_model, named_modules
from silverspoon_kd.capture.selectors import Selector, select, select_logits
from silverspoon_kd.capture.session import Capture, Tap, Trace, forward_replaced
from silverspoon_kd.capture.units import keeps_to_itself, wrap_units

__all__ = [
    "LABEL_KEYS",
    "Capture",
    "InputView",
    "Selector",
    "Tap",
    "Trace",
    "base_of",
    "clean_name",
    "embeddings_of",
    "find_module",
    "forward_replaced",
    "is_peft_model",
    "keeps_to_itself",
    "named_modules",
    "select",
    "select_logits",
    "wrap_units",
]
