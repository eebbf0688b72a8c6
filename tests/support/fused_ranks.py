"""Trainings with and without logits on two ranks: ``torchrun fused_ranks.py FOLDER``, everything once."""

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from support.distil import make, training_logs
from support.tiny import Rows, qwen3

ZERO3 = {"deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}}
MODES: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"fsdp": "full_shard"}, "zero3": ZERO3}
TIED = {"tie_word_embeddings": True, "vocab": 80}  # and padded
# Name -> the student's config and where it has adapters, the training arguments.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied": (TIED, {"gradient_accumulation_steps": 2}),
    "tied-task": (TIED, {"alpha": 0.4, "gradient_accumulation_steps": 2}),
    "adapters": ({"adapters": ["q_proj", "lm_head"]}, {}),
    "aligned-task": ({}, {"alpha": 0.4, "gradient_accumulation_steps": 2}),
    "bf16-task": ({}, {"alpha": 0.4, "bf16": True}),
}
WAYS = {"fused": None, "dense": False}


def build(name: str, folder: Path, ranks: int, **changes: Any) -> Any:
    """The distiller of a case: with 8 rows a step over all ranks."""
    config, training = CASES[name]
    accumulation = training.get("gradient_accumulation_steps", 1)
    values = {
        "per_device_train_batch_size": 8 // ranks // accumulation,
        "per_device_eval_batch_size": 4 // ranks,
        "max_steps": 3,
        "learning_rate": 0.5,
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        **training,
        **changes,
    }
    config = dict(config)
    targets = config.pop("adapters", None)
    models = {
        "teacher": qwen3(0, layers=2, initializer_range=0.1),
        "student": qwen3(1, layers=2, hidden=16, initializer_range=0.1, **config),
    }
    if targets:
        models["student"] = get_peft_model(
            models["student"], LoraConfig(target_modules=targets, init_lora_weights=False)
        )
    given = {"eval_dataset": Rows(7, seed=3), "compute_metrics": _mean_logit}
    if not name.startswith("aligned"):
        return make("response", folder, given=given, **models, **values)
    alignment = {"lm_head": {"loss_function": "kl_divergence"}}
    return make(
        "holistic", folder, given=given, modules=r"lm_head|model\.layers\.0", alignment=alignment, **models, **values
    )


def outcome(distiller: Any) -> dict[str, Any]:
    """Train and evaluate."""
    before = whole(distiller.root)
    distiller.train()
    last = distiller.evaluate()
    return {
        "way": distiller.plan.logits,
        "before": before,
        "after": whole(distiller.root),
        "logs": [
            {key: entry[key] for key in entry if key.startswith("loss") or key == "grad_norm"}
            for entry in training_logs(distiller)
        ],
        "metrics": {key: last[key] for key in last if "loss" in key or "logit" in key},
    }


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, gathered from the ranks."""
    return {name: _full(parameter).detach().clone() for name, parameter in model.named_parameters()}


def _full(parameter: Any) -> Tensor:
    if hasattr(parameter, "ds_shape"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.data.float().clone()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _mean_logit(prediction: Any) -> dict[str, float]:
    return {"logit": float(abs(prediction.predictions).mean())}


def main(folder: Path) -> None:
    """Run everything on this rank."""
    transformers.logging.set_verbosity_error()
    gc.freeze()
    found = {
        (mode, name, way): outcome(build(name, folder / mode / name / way, 2, fused_losses=value, **arguments))
        for mode, arguments in MODES.items()
        for name in CASES
        for way, value in WAYS.items()
    }
    rank = torch.distributed.get_rank()
    torch.save(found, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
