"""Whether a refused run left everything as it was."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from silverspoon_kd.errors import SilverSpoonError


def condition(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a user would notice if it changed."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().float().numpy().tobytes())
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "trainable": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "gradients": [name for name, parameter in model.named_parameters() if parameter.grad is not None],
        "hooks": {
            name: (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
            for name, module in model.named_modules()
        },
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "config": getattr(model, "config", None) and model.config.to_dict(),
        "weights": digest.hexdigest(),
    }


@contextmanager
def refused(kind: type[Exception], match: str, folder: Path, *models: nn.Module) -> Iterator[None]:
    """Expect an error of ours, with the models as before and nothing in the output folder."""
    before = [condition(model) for model in models]
    with pytest.raises(kind, match=match) as caught:
        yield
    assert isinstance(caught.value, SilverSpoonError)
    for model, state in zip(models, before, strict=True):
        now = condition(model)
        changed = [key for key, value in now.items() if value != state[key]]
        assert not changed, f"{type(model).__name__}: {changed}"
    assert not folder.is_dir() or not any(folder.iterdir()), sorted(folder.iterdir())
