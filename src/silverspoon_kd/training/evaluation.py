"""Evaluation of a student that is not trained yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from silverspoon_kd.training.deepspeed import is_partitioned


@contextmanager
def evaluated_as_it_is(trainer: Any) -> Iterator[None]:
    """Evaluate, and leave a student that was not wrapped for training yet as training has to find it.

    An engine of DeepSpeed evaluates only what it has divided (ZeRO-3). Otherwise accelerate notes the bare student as
    prepared, and would train it bare: no gradient would ever be averaged over the ranks.
    """
    enabled, models = trainer.is_deepspeed_enabled, trainer.accelerator._models
    prepared = bool(models)
    if enabled and trainer.deepspeed is None and not is_partitioned(trainer.root):
        trainer.is_deepspeed_enabled = False
    try:
        yield
    finally:
        trainer.is_deepspeed_enabled = enabled
        if not prepared and trainer.model_wrapped is trainer.root and trainer.plan.student_mode != "fsdp":
            trainer.root._is_accelerate_prepared = False
            models.clear()
