"""FSDP students on each of two ranks: ``torchrun fsdp_ranks.py FOLDER`` writes FOLDER/CASE.rankN.pt."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule

from support.distil import LAYERS, make, training_logs
from support.tiny import Rows, qwen3

TOP = r"model\.layers\.[12]"
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SIZES = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 3000}
FULL = {"fsdp": "full_shard"}
PREFETCH = {"backward_prefetch": "backward_pre", "forward_prefetch": True}


def narrow(**changes: Any) -> Any:
    """The usual student: with projectors."""
    return qwen3(1, hidden=16, **changes)


def lora() -> Any:
    """A student of which adapters are trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(qwen3(1), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def frozen_embeddings() -> Any:
    """A student whose embeddings stay as they are."""
    student = narrow()
    student.model.embed_tokens.requires_grad_(False)
    return student


# name -> distiller, student, arguments of make and of training; what is of FSDP is left out on one process.
Spec = tuple[str, Callable[[], Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Spec] = {
    "inner-first": ("holistic", narrow, {"modules": r"model\.layers\.0\.mlp"}, FULL),
    "inner": ("blockwise", narrow, {"modules": r"model\.layers\.[02]\.mlp\.down_proj"}, FULL),
    "inner-attention": ("holistic", narrow, {"modules": r"model\.layers\.[02]\.self_attn"}, FULL),
    "tied": ("response", lambda: narrow(tie_word_embeddings=True), {}, {**FULL, "learning_rate": 2.0}),
    "recomputed": ("blockwise", narrow, {}, {**FULL, "fsdp_config": {"activation_checkpointing": True}}),
    "recomputed-holistic": ("holistic", narrow, {}, {**FULL, "fsdp_config": {"activation_checkpointing": True}}),
    "sizes": ("holistic", narrow, {}, {"fsdp": True, "fsdp_config": SIZES}),
    "unwrapped": ("holistic", narrow, {}, {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}),
    "by-name": ("blockwise", narrow, {}, {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "Qwen3MLP"}}),
    "grad-op": ("response", narrow, {}, {"fsdp": "shard_grad_op", "learning_rate": 0.5, "alpha": 0.5}),
    "list": ("holistic", narrow, {}, {"fsdp": ["full_shard", "auto_wrap"]}),
    "offload": ("response", narrow, {}, {"fsdp": "full_shard offload", "learning_rate": 2.0}),
    "prefetch": ("holistic", narrow, {}, {**FULL, "fsdp_config": PREFETCH}),
    "frozen": ("holistic", frozen_embeddings, {"modules": TOP}, FULL),
    "lora": ("holistic", lora, {"modules": LAYERS}, {**FULL, "learning_rate": 10.0}),
    "clipped": ("blockwise", narrow, {}, {**FULL, "max_grad_norm": 0.1, "gradient_accumulation_steps": 2}),
}  # fmt: skip


def build(name: str, folder: Path, **changes: Any) -> Any:
    """The distiller of a case: with 8 rows a step over all ranks."""
    kind, student, made, training = CASES[name]
    training = {key: value for key, value in training.items() if WORLD > 1 or not key.startswith("fsdp")}
    common = {"per_device_train_batch_size": 4 // WORLD, "train_sampling_strategy": "sequential"}
    return make(kind, folder / name, student=student(), **made, **{**common, **training, **changes})


def whole(root: Any) -> dict[str, Tensor]:
    """All parameters, gathered."""
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in root.named_parameters()
    }


def settings(root: Any) -> dict[str, Any]:
    """What FSDP was told for the second decoder layer."""
    layers = [module for name, module in root.named_modules() if name.endswith("model.layers.1")]
    if not isinstance(layers[0], FSDPModule):
        return {}
    state = layers[0]._get_fsdp_state()
    return {
        "forward": len(state._states_to_forward_prefetch),
        "backward": len(state._states_to_backward_prefetch),
        "frees": state._fsdp_param_groups[0].post_forward_mesh_info is not None,
        "dtype": str(state._mp_policy.param_dtype),
    }


def outcome(distiller: Any) -> dict[str, Any]:
    """Train, and look at everything."""
    before = whole(distiller.root)
    distiller.train()
    own = {id(parameter) for parameter in distiller.root.parameters()}
    held = [parameter for group in distiller.optimizer.param_groups for parameter in group["params"]]
    units = [name for name, module in distiller.root.named_modules() if isinstance(module, FSDPModule)]
    shares = sum(each.to_local().numel() for each in distiller.root.parameters() if hasattr(each, "to_local"))
    return {
        "before": before,
        "after": whole(distiller.root),
        "losses": [entry["loss"] for entry in training_logs(distiller)],
        "norms": [entry["grad_norm"] for entry in training_logs(distiller)],
        "units": units,
        "held": all(id(parameter) in own for parameter in held),
        "settings": settings(distiller.root),
        "recomputes": getattr(distiller.student_model, "is_gradient_checkpointing", False),
        "share": shares / max(1, sum(each.numel() for each in distiller.root.parameters())),
    }


def other_weights(folder: Path, *, meta: bool) -> dict[str, Any]:
    """Rank 1 starts with another student, or with one that was never loaded."""
    student = qwen3(1 + 7 * RANK, hidden=16)
    if meta and RANK:
        # As transformers leaves it: the rotary tables have been worked out.
        student.model.embed_tokens.to("meta")
        student.model.layers.to("meta")
        student.lm_head.to("meta")
    config = {"cpu_ram_efficient_loading": True} if meta else {}
    extra = {"fsdp": "full_shard", "fsdp_config": config} if WORLD > 1 else {}
    common = {"per_device_train_batch_size": 4 // WORLD, "train_sampling_strategy": "sequential"}
    return outcome(make("response", folder / "other", student=student, **common, **extra))


def mixed(folder: Path) -> dict[str, Any]:
    """Train in bfloat16; a student that was loaded so is kept in full precision."""
    student = qwen3(1, hidden=16).bfloat16()
    extra = {"fsdp": "full_shard"} if WORLD > 1 else {}
    distiller = make(
        "holistic", folder / "mixed", student=student, bf16=True, per_device_train_batch_size=4 // WORLD, **extra
    )
    found = outcome(distiller)
    return {**found, "dtypes": sorted({str(each.dtype) for each in distiller.root.parameters()})}


def evaluated(folder: Path) -> dict[str, Any]:
    """Evaluate before, while and after a training."""
    rows = Rows(n=6, seed=3)
    distiller = make(
        "blockwise",
        folder / "evaluated",
        given={"eval_dataset": rows},
        per_device_train_batch_size=4 // WORLD,
        per_device_eval_batch_size=2,  # each batch is averaged by itself
        train_sampling_strategy="sequential",
        eval_strategy="steps",
        eval_steps=2,
        e2e_eval_loss="forward",
        **({"fsdp": "full_shard"} if WORLD > 1 else {}),
    )
    first = distiller.evaluate()
    distiller.train()
    last = distiller.evaluate()
    between = [entry["eval_loss"] for entry in distiller.state.log_history if "eval_loss" in entry]
    logits = distiller.predict(rows).predictions
    return {"losses": [first["eval_loss"], *between, last["eval_loss"]], "logits": torch.as_tensor(logits)}


def resumable(folder: Path, seed: int, state: str, **changes: Any) -> Any:
    """Six steps with two optimizers, projectors and a schedule, saved after three."""
    alignment = {
        "model.layers.0": {"learning_rate": 1e-2, "optimizer": "adagrad"},
        "model.layers.1": {"learning_rate": 3e-3, "max_grad_norm": 0.1},
    }
    values = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 6 // WORLD,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": 3,
        "fsdp": "full_shard",
        "fsdp_config": {"state_dict_type": state},
    }
    rows = {"train_dataset": Rows(n=36)}  # three whole steps on every number of ranks
    student = qwen3(seed, hidden=16)
    return make("holistic", folder, student=student, alignment=alignment, given=rows, **{**values, **changes})


def resumed(folder: Path, state: str) -> dict[str, Any]:
    """Compare six steps with three, a resume, and three more; save and load the student."""
    straight = resumable(folder, 1, state)
    straight.train()
    after = whole(straight.root)
    again = resumable(folder, 7, state, output_dir=str(folder / "again"))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    other = whole(again.root)
    straight.save_model(str(folder / "final"))
    distributed.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "final")
    inner = [each.state_dict()["state"] for each in (straight.optimizer, again.optimizer)]
    own, theirs = ([full(v) for values in each.values() for v in values.values()] for each in inner)
    return {
        "files": sorted(str(path.relative_to(folder)) for path in (folder / "checkpoint-3").rglob("*")),
        "weights": [name for name in after if not torch.equal(after[name], other[name])],
        "optimizer": len(own) == len(theirs) and all(map(torch.equal, own, theirs)),
        "loaded": [name for name, each in loaded.named_parameters() if not torch.equal(each, after[f"student.{name}"])],
        "class": loaded.config.architectures,
        "logs": training_logs(straight)[3:] == training_logs(again)[3:],
        "tags": [group["alignment"] for group in again.optimizer.param_groups],
        "after": after,
    }


def full(value: Any) -> Tensor:
    """A tensor of an optimizer's state, gathered."""
    value = torch.as_tensor(value)
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def on_other_ranks(folder: Path, state: str) -> dict[str, Any]:
    """Go on from a checkpoint of two ranks, with as many rows in a step."""
    again = resumable(folder, 7, state, output_dir=str(folder / "other"))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return {"after": whole(again.root)}


def special(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is no training of CASES."""
    return {
        "other": lambda: other_weights(folder, meta=False),
        "meta": lambda: other_weights(folder, meta=True),
        "mixed": lambda: mixed(folder),
        "evaluated": lambda: evaluated(folder),
    }


def main(folder: Path) -> None:
    """Run everything on this rank, or, on another number of ranks than two, only what goes on from there."""
    transformers.logging.set_verbosity_error()
    gc.freeze()
    runs: dict[str, Callable[[], dict[str, Any]]] = {}
    states = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
    if WORLD == 2:
        runs |= {name: lambda name=name: outcome(build(name, folder)) for name in CASES}
        runs |= special(folder)
        runs |= {state: lambda state=state: resumed(folder / state, state) for state in states}
    else:
        runs |= {f"{state}-{WORLD}": lambda state=state: on_other_ranks(folder / state, state) for state in states}
    chosen = sys.argv[2:] or runs
    for name in chosen:
        torch.save(runs[name](), folder / f"{name}.rank{RANK}.pt")
        print(f"rank {RANK}: {name}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
