"""DeepSpeed students on this rank: ``torchrun deepspeed_ranks.py FOLDER [NAME ...]`` writes FOLDER/NAME.rankN.pt."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from parity.cases import NORMS, PARITY_CASES, Layout
from parity.runs import build
from silverspoon_kd.errors import SilverSpoonError
from support.distil import KINDS, LAYERS, make, training_logs
from support.tiny import Rows, collate, qwen3

BY_NAME = {case.name: case for case in PARITY_CASES}
BATCH = 2
RATES = {"model.layers.0": {"learning_rate": 1e-4, "max_grad_norm": 0.02}}
INSIDE = r"model\.layers\.0\.(mlp|self_attn\.o_proj)"
HALF = [("response", 0), ("holistic", 1), ("blockwise", 2), ("response", 3), ("holistic", 3), ("blockwise", 3)]
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler_type": "linear", "max_grad_norm": 0.5}


def config(stage: int, **changes: Any) -> dict[str, Any]:
    """A config that also partitions tiny weights."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **changes.pop("zero", {})}
    return {"zero_optimization": zero, **changes}


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, gathered from the ranks."""
    from deepspeed.runtime.zero import GatheredParameters

    found = {}
    for name, parameter in model.named_parameters():
        with GatheredParameters([parameter]):
            found[name] = parameter.detach().float().clone()
    return found


def build_tiny(kind: str, folder: Path, **changes: Any) -> Any:
    """A distiller over models of two layers."""
    models = {"teacher": qwen3(0, layers=2), "student": qwen3(1, layers=2, hidden=16)}
    return make(kind, folder, **{**models, "per_device_train_batch_size": BATCH, "max_steps": 2, **changes})


def run(kind: str, folder: Path, stage: int, **changes: Any) -> Any:
    """The same, trained."""
    distiller = build_tiny(kind, folder, **{"deepspeed": config(stage), **changes})
    distiller.train()
    return distiller


def numbers(distiller: Any) -> list[dict[str, float]]:
    """Losses, rates and norms of each step."""
    return [
        {key: value for key, value in entry.items() if key.startswith(("loss", "grad_norm", "learning_rate"))}
        for entry in training_logs(distiller)
    ]


def refusal(call: Callable[[], Any]) -> str:
    """What our error says."""
    try:
        call()
    except SilverSpoonError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def stages(folder: Path) -> dict[str, Any]:
    """What wraps and divides the student in each stage, and how many engines there are."""
    from deepspeed import DeepSpeedEngine

    found = {}
    for stage in range(4):
        for placement in ("replicated", "sharded") if stage else ("replicated",):
            distiller = run("holistic", folder, stage, max_steps=2, teacher_placement=placement)
            engines = [
                each for each in gc.get_objects() if type(each) is DeepSpeedEngine and each.optimizer is not None
            ]
            found[f"{stage} {placement}"] = {
                "wrapped": type(distiller.model_wrapped).__name__,
                "stage": distiller.model_wrapped.zero_optimization_stage(),
                "optimizer": type(distiller.model_wrapped.optimizer).__name__,
                "empty": sum(parameter.numel() == 0 for parameter in distiller.root.parameters()),
                "parameters": len(list(distiller.root.parameters())),
                "teacher": type(distiller._executor.teacher).__name__,
                "own engines": len([each for each in engines if each.module is distiller.root]),
                "teacher engines": len([each for each in engines if each.module is distiller.teacher]),
                "logs": numbers(distiller),
            }
            distiller.accelerator.free_memory()
    return found


def rates(folder: Path) -> dict[str, Any]:
    """The rates of four steps with accumulation, from the log, and those in the groups at the end."""
    own = {**ADAM, "max_grad_norm": 0, "max_steps": 4, "gradient_accumulation_steps": 2}
    distiller = run("holistic", folder, 2, alignment=RATES, **own)
    groups = distiller.optimizer.param_groups
    return {
        "logs": numbers(distiller),
        "last": {group["alignment"]: group["lr"] for group in groups},
        "tags": [(group["alignment"], group["decay"], group["projector"]) for group in groups],
    }


def config_blocks(folder: Path) -> dict[str, Any]:
    """An optimizer and a scheduler in the config."""
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    own = run("holistic", folder, 2, alignment=RATES, **{**ADAM, "deepspeed": config(2, optimizer=optimizer)})
    plain = run("holistic", folder, 2, alignment=RATES, **ADAM)
    both = {**ADAM, "deepspeed": config(2, scheduler=scheduler), "warmup_steps": 2, "max_steps": 4}
    scheduled = run("holistic", folder, 2, **both)
    return {
        "optimizer": type(own.model_wrapped.basic_optimizer).__name__,
        "tags": [group["alignment"] for group in own.optimizer.param_groups],
        "own": numbers(own),
        "plain": numbers(plain),
        "own weights": whole(own.root),
        "plain weights": whole(plain.root),
        "scheduled": [entry["learning_rate/student"] for entry in numbers(scheduled)],
        "refused rate": refusal(lambda: build_tiny("holistic", folder, alignment=RATES, **both)),
        "refused optimizer": refusal(
            lambda: build_tiny(
                "holistic", folder, alignment={"model.layers.1": {"optimizer": "sgd"}}, deepspeed=config(2)
            )
        ),
    }


def clipped(folder: Path) -> dict[str, Any]:
    """One step of SGD with rate 1 on losses times 1000, clipped."""
    found = {}
    for stage in range(4):
        for offload in ({}, {"offload_optimizer": {"device": "cpu"}}) if stage > 1 else ({},):
            case = BY_NAME["holistic-narrow"]
            distiller = build(
                case,
                Layout(batch=2, ranks=2),
                folder,
                max_steps=1,
                learning_rate=1.0,
                max_grad_norm=1.0,
                alignments=_weighted(case, 1000.0),
                deepspeed=config(stage, gradient_clipping="auto", zero=offload),
            )
            before = whole(distiller.root)
            distiller.train()
            found[f"{stage}{' offloaded' if offload else ''}"] = {
                "before": before,
                "after": whole(distiller.root),
                "norms": numbers(distiller)[0],
                "engine clips": distiller.model_wrapped.gradient_clipping(),
            }
    return found


def _weighted(case: Any, weight: float) -> Any:
    from parity.cases import build_student, build_teacher
    from silverspoon_kd import create_alignments

    return create_alignments(
        build_teacher(case), build_student(case), case.modules, output_selector_index=0, loss_weight=weight
    )


def config_forms(folder: Path) -> dict[str, Any]:
    """The same config as a dict, a file and JSON text, without the switches that DeepSpeed asks for."""
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    before = json.dumps(given)
    path = folder / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(before)
    logs = [
        numbers(run("holistic", folder, 2, deepspeed=form, optim="adafactor")) for form in (given, str(path), before)
    ]
    return {"same": logs[0] == logs[1] == logs[2], "unchanged": json.dumps(given) == before, "logs": logs[0]}


def born_partitioned(folder: Path) -> dict[str, Any]:
    """A student and a teacher made when there are ZeRO-3 arguments already, and both loaded then."""
    from support.tiny import arguments

    found: dict[str, Any] = {}
    args = arguments(folder, deepspeed=config(3), per_device_train_batch_size=BATCH, max_steps=2)
    whole_student, whole_teacher = qwen3(1, layers=2, hidden=16), qwen3(0, layers=2)
    for kind in KINDS:
        student, teacher = _born(whole_student), _born(whole_teacher)
        partitioned = all(parameter.numel() == 0 for model in (student, teacher) for parameter in model.parameters())
        distiller = _of(kind, teacher, student, args)
        distiller.train()
        found[kind] = {
            "partitioned": partitioned,
            "logs": numbers(distiller),
            "teacher": all(map(torch.equal, whole_teacher.parameters(), distiller.teacher.parameters())),
        }
    folders = {"teacher": whole_teacher, "student": whole_student}
    for name, model in folders.items():
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(folder / name)
    torch.distributed.barrier()
    distiller = _of("response", str(folder / "teacher"), str(folder / "student"), args)
    distiller.train()
    found["loaded"] = {"logs": numbers(distiller)}
    return found


def _born(model: nn.Module) -> nn.Module:
    """Make the model anew under what transformers knows of ZeRO-3, with the same weights."""
    from deepspeed.runtime.zero import GatheredParameters

    born = type(model)._from_config(model.config)
    for target, source in zip(born.parameters(), model.parameters(), strict=True):
        with GatheredParameters([target], modifier_rank=0):
            target.data.copy_(source.data)
    return born


def _of(kind: str, teacher: Any, student: Any, args: Any) -> Any:
    from silverspoon_kd import BlockwiseDistiller, HolisticDistiller, ResponseBasedDistiller, create_alignments

    values = {"args": args, "train_dataset": Rows(), "data_collator": collate}
    if kind == "response":
        return ResponseBasedDistiller(student, teacher, **values)
    names = [qwen3(0, layers=2), qwen3(1, layers=2, hidden=16)]
    alignments = create_alignments(*names, LAYERS, output_selector_index=0)
    kinds = {"holistic": HolisticDistiller, "blockwise": BlockwiseDistiller}
    return kinds[kind](teacher, alignments, student_model=student, **values)


def frozen(folder: Path) -> dict[str, Any]:
    """A student whose embedding someone froze."""
    found = {}
    for stage in (1, 2, 3):
        student = qwen3(1, layers=2, hidden=16)
        student.model.embed_tokens.weight.requires_grad_(False)
        before = student.model.embed_tokens.weight.detach().clone()
        distiller = build_tiny("holistic", folder, student=student, deepspeed=config(stage))
        names = {id(parameter): name for name, parameter in distiller.root.named_parameters()}
        grouped: list[str] = []
        given = distiller._parameter_groups

        def seen(given: Any = given, grouped: list[str] = grouped, names: dict[int, str] = names) -> Any:
            groups = given()
            grouped += [names[id(parameter)] for group in groups for parameter in group["params"]]
            return groups

        distiller._parameter_groups = seen
        distiller.train()
        after = whole(distiller.root)["student.model.embed_tokens.weight"]
        found[stage] = {"unchanged": torch.equal(after, before), "grouped": grouped, "logs": numbers(distiller)}
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """Four steps at once, and two, a resume, and two more."""
    found = {}
    for stage in (2, 3):
        where = folder / str(stage)
        own = {**ADAM, "alignment": RATES, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        straight = run("holistic", where, stage, **own)
        student = qwen3(5, layers=2, hidden=16)
        again = build_tiny("holistic", where, student=student, deepspeed=config(stage), **own)
        again.train(resume_from_checkpoint=str(where / "checkpoint-2"))
        found[stage] = {
            "straight": whole(straight.root),
            "again": whole(again.root),
            "logs": (numbers(straight), numbers(again)),
            "tags": [_tags(each) for each in (straight, again)],
            "rates": [[group["lr"] for group in each.optimizer.param_groups] for each in (straight, again)],
            "files": sorted(path.name for path in (where / "checkpoint-4").iterdir()),
        }
    folder = folder / "2"
    found["other stage"] = refusal(lambda: _resume(folder, deepspeed=config(1), **ADAM))
    found["without"] = refusal(lambda: _resume(folder, deepspeed=None, **ADAM))
    return found


def _tags(distiller: Any) -> list[tuple]:
    return [(group["alignment"], group["decay"], group["projector"]) for group in distiller.optimizer.param_groups]


def _resume(folder: Path, **changes: Any) -> None:
    distiller = build_tiny("holistic", folder, alignment=RATES, **changes)
    distiller.train(resume_from_checkpoint=str(folder / "checkpoint-2"))


def saved(folder: Path) -> dict[str, Any]:
    """The folder of the final model, and the best checkpoint loaded at the end."""
    found = {}
    for stage in (2, 3):
        where = folder / str(stage)
        best = {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "load_best_model_at_end": True,
            "greater_is_better": True,  # the first one, since the loss falls
            "metric_for_best_model": "loss",
        }
        teacher = qwen3(0, layers=2)
        own = {"teacher": teacher, "given": {"eval_dataset": Rows(n=8, seed=3)}, "max_steps": 3, "weight_decay": 0.1}
        before = {name: value.clone() for name, value in teacher.state_dict().items()}
        distiller = run("holistic", where, stage, **own, **best)
        distiller.save_model(str(where / "final"))
        torch.distributed.barrier()
        found[stage] = {
            "best": Path(distiller.state.best_model_checkpoint).name,
            "weights": whole(distiller.root),
            "teacher": all(torch.equal(before[name], value) for name, value in teacher.state_dict().items()),
            "gradients": [name for name, parameter in teacher.named_parameters() if parameter.grad is not None],
            "folder": str(where / "final"),
            "first": str(where / "checkpoint-1"),
            "last": str(where / "checkpoint-3"),
        }
    return found


def evaluated_first(folder: Path) -> dict[str, Any]:
    """Evaluation before training, and training afterwards."""
    found = {}
    for stage in (2, 3):
        given = {"eval_dataset": Rows(n=8, seed=3)}
        distiller = build_tiny("holistic", folder, given=given, deepspeed=config(stage))
        metrics = distiller.evaluate()
        distiller.train()
        found[stage] = {"metrics": metrics, "logs": numbers(distiller), "after": distiller.evaluate()}
    return found


def trained_again(folder: Path) -> dict[str, Any]:
    """A second training with the same distiller."""
    found = {}
    for stage in (2, 3):
        distiller = run("holistic", folder, stage)
        first = numbers(distiller)
        distiller.train()
        found[stage] = (first, numbers(distiller))
    return found


def adapters(folder: Path) -> dict[str, Any]:
    """A LoRA student whose teacher is its own base model, and a plain module, saved."""
    student = with_adapters(qwen3(1, layers=2, hidden=16))
    distiller = run("response", folder, 3, student=student, teacher=student.get_base_model(), learning_rate=1.0)
    distiller.save_model(str(folder / "adapters"))
    plain = build(NORMS[1], Layout(batch=2, ranks=2), folder, save_strategy="no", deepspeed=config(3))
    plain.train()
    plain.save_model(str(folder / "plain"))
    torch.distributed.barrier()
    return {
        "logs": numbers(distiller),
        "weights": whole(distiller.root),
        "plain": whole(plain.root),
        "folder": str(folder),
    }


def with_adapters(model: nn.Module) -> nn.Module:
    """A LoRA model whose adapters do something."""
    import peft

    torch.manual_seed(3)
    student = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    return student


def inside_blocks(folder: Path) -> dict[str, Any]:
    """Losses on modules inside the blocks, after which the forward stops, with and without recomputation."""
    return {
        str(checkpointing): numbers(run("holistic", folder, 3, modules=INSIDE, gradient_checkpointing=checkpointing))
        for checkpointing in (False, True)
    }


def half_precision(folder: Path) -> dict[str, Any]:
    """The losses of a few steps in bf16."""
    return {f"{kind} {stage}": numbers(run(kind, folder, stage, bf16=True, learning_rate=0.01)) for kind, stage in HALF}


def one_block_broken(folder: Path) -> dict[str, Any]:
    """A block whose gradients are not finite in the second step."""
    found = {}
    for stage in (2, 3):
        distiller = build_tiny("blockwise", folder, deepspeed=config(stage))
        weights: list[dict[str, Tensor]] = []
        distiller.add_callback(_Kept(distiller.root, weights))
        distiller.student_model.model.layers[1].register_forward_hook(_broken_from_the_second)
        distiller.train()
        first, second = weights
        found[stage] = {
            "stopped": [name for name in _trained(distiller) if torch.equal(first[name], second[name])],
            "finite": all(bool(torch.isfinite(value).all()) for value in second.values()),
            "logs": numbers(distiller),
        }
    return found


def _trained(distiller: Any) -> list[str]:
    return [name for name, _ in distiller.root.named_parameters() if "layers" in name or "projectors" in name]


class _Kept(transformers.TrainerCallback):
    """The weights after each step."""

    def __init__(self, root: nn.Module, weights: list[dict[str, Tensor]]) -> None:
        self.root, self.weights = root, weights

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append(whole(self.root))


def _broken_from_the_second(module: nn.Module, args: Any, output: Any) -> Any:
    module.calls = getattr(module, "calls", 0) + 1
    tensor = output if isinstance(output, Tensor) else output[0]
    if module.calls > 1 and tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient * float("nan"))
    return output


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    run.__name__: run
    for run in (
        stages,
        rates,
        config_blocks,
        clipped,
        config_forms,
        born_partitioned,
        frozen,
        resumed,
        saved,
        evaluated_first,
        trained_again,
        adapters,
        inside_blocks,
        half_precision,
        one_block_broken,
    )
}


def path_of(folder: Path, name: str, rank: int) -> Path:
    """Return where a rank writes what it found."""
    return folder / f"{name}.rank{rank}.pt"


def main(folder: Path, names: list[str]) -> None:
    """Make the runs, one after the other."""
    transformers.logging.set_verbosity_error()
    gc.freeze()  # every training run collects garbage, which takes longer than its steps
    rank = int(os.environ["RANK"])
    for name in names or RUNS:
        start = time.perf_counter()
        part = folder / f"rank{rank}.part"
        torch.save(RUNS[name](folder / name), part)
        part.rename(path_of(folder, name, rank))
        print(f"rank {rank}: {name} {time.perf_counter() - start:.1f} s", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
