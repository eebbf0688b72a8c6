"""Running statistics, such as those of batch normalisation, that are the same on all ranks."""

from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback


class SharedBuffers(TrainerCallback):
    """Give all ranks the buffers of the first before they are evaluated or saved, and at the end.

    DDP does so at the start of each forward; what the last forward changed would stay different on each rank.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_evaluate or control.should_save:
            _share(args, kwargs["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_evaluate or control.should_save:
            _share(args, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _share(args, kwargs["model"])


def _share(args: Any, model: nn.Module) -> None:
    if args.world_size == 1 or args.ddp_broadcast_buffers is False:
        return
    for buffer in model.buffers():
        if buffer.device.type == args.device.type:
            value = buffer.contiguous()
            dist.broadcast(value, src=0)
            if value is not buffer:
                buffer.copy_(value)
