"""A teacher that is sharded over all ranks: ``torchrun sharded_ranks.py FOLDER TEACHER`` writes FOLDER/rank-N.json."""

import copy
import gc
import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from silverspoon_kd import ResponseBasedDistiller
from silverspoon_kd.capture import Tap
from silverspoon_kd.teacher.hygiene import freeze_teacher
from silverspoon_kd.teacher.sharding import shard_frozen
from silverspoon_kd.teacher.world.spec import WorldSpec
from silverspoon_kd.teacher.world.strategies import place_tensor
from support.distil import KINDS, make, training_logs
from support.more_models import gpt2
from support.tiny import Rows, arguments, collate, qwen3

IDS = torch.arange(1, 25).view(2, 12)


class OwnPlan(nn.Module):
    """A model with a plan of torch's own styles."""

    _tp_plan: ClassVar = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Stack(nn.Module):
    """A model that names no blocks; its head is tied to its embedding."""

    def __init__(self, blocks: int = 3, width: int = 8, vocab: int = 100) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def share(model: nn.Module) -> float:
    """How much of all parameters this rank holds."""
    parameters = list(model.parameters())
    held = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in parameters)
    return held / sum(each.numel() for each in parameters)


def sharded(model: nn.Module, **options: Any) -> dict[str, float]:
    """Shard, and compare two forwards with the plain model's."""
    freeze_teacher(model)
    plain = copy.deepcopy(model)
    shard_frozen(model, init_device_mesh("cpu", (2,)), torch.device("cpu"), **options)

    def logits(each: nn.Module) -> Tensor:
        with torch.no_grad():
            output = each(IDS)
        return getattr(output, "logits", output)

    difference = max(float((logits(model) - logits(plain)).abs().max()) for _ in range(2))
    return {"difference": difference, "share": share(model)}


def no_split_modules() -> dict[str, Any]:
    """E-02: declared in every way, also not at all."""
    found = {"missing": sharded(Stack()), "small units": sharded(Stack(), size_threshold=80)}
    for name, value in {"none": None, "empty": [], "tuple": ("Sequential", "Gone")}.items():
        model = Stack()
        model._no_split_modules = value
        found[name] = sharded(model)
    return found


def tied() -> dict[str, Any]:
    """E-05: units would be as large as the embedding."""
    model = gpt2(3)
    model._no_split_modules = None
    return {"stack": sharded(Stack(), size_threshold=900), "gpt2": sharded(model, size_threshold=3000)}


def tensor_parallel() -> dict[str, Any]:
    """What each process of a tensor-parallel teacher holds."""
    spec = WorldSpec(
        source="", taps=(), strategy="tp", device_type="cpu", devices=(0, 1), cores=(), wrap_cls=None, autocast=None,
        num_students=1, example=None, timeout=60, load_timeout=60, search_path=(),
    )  # fmt: skip
    plain, model = qwen3(3).eval(), qwen3(3).eval()
    place_tensor(model, spec, distributed.get_rank())
    with torch.no_grad():
        difference = float((model(IDS).logits - plain(IDS).logits).abs().max())
    named = {"difference": difference, "share": share(model.model.layers[0].mlp)}
    x, own = torch.arange(16.0).view(2, 8) / 16, OwnPlan()
    with torch.no_grad():
        expected = own(x)
        place_tensor(own, spec, distributed.get_rank())
        difference = float((own(x) - expected).abs().max())
    return {"named": named, "torch": {"difference": difference, "share": share(own)}}


def features(distiller: Any, taps: list[Tap]) -> list[Tensor]:
    """What the placed teacher gives for a batch."""
    run = distiller._executor.start(collate([Rows()[0], Rows()[1]]))
    return [run.take(tap) for tap in taps]


def captured(folder: Path) -> dict[str, Any]:
    """E-20: features of a replicated and a sharded teacher, before and after two steps."""
    found, losses, held = {}, {}, 0.0
    for placement in ("replicated", "sharded"):
        distiller = make(
            "holistic", folder, teacher_placement=placement, max_steps=2, learning_rate=0.0, report_to="none"
        )
        taps = distiller._executor._taps
        before = features(distiller, taps)
        distiller.train()
        found[placement] = [*before, *features(distiller, taps)]
        losses[placement] = [entry["loss"] for entry in training_logs(distiller)]
        held = share(distiller._executor.teacher)
    pairs = list(zip(found["replicated"], found["sharded"], strict=True))
    return {
        "losses": losses,
        "share": held,
        "difference": max(float((one - other).abs().max()) for one, other in pairs),
        "plain": all(type(other) is Tensor and other.grad_fn is None for _, other in pairs),
        "shapes": [list(other.shape) for _, other in pairs],
    }


def mixed(folder: Path) -> dict[str, Any]:
    """E-11: bf16 of a sharded and a replicated teacher."""
    found = {}
    for placement in ("replicated", "sharded"):
        distiller = make("holistic", folder, teacher_placement=placement, bf16=True, max_steps=1, report_to="none")
        found[placement] = features(distiller, distiller._executor._taps)
        dtypes = {str(each.dtype) for each in distiller._executor.teacher.state_dict().values()}
    pairs = list(zip(found["replicated"], found["sharded"], strict=True))
    return {
        "dtypes": [(str(one.dtype), str(other.dtype)) for one, other in pairs],
        "difference": max(float((one - other).float().norm() / one.float().norm()) for one, other in pairs),
        "weights": sorted(dtypes),
    }


def loaded(folder: Path, teacher: str) -> dict[str, Any]:
    """B-06, E-12, E-14, E-19: a teacher by its folder."""
    groups: list[Any] = []
    original = distributed.new_group

    def recorded(ranks=None, *args, **kwargs):
        groups.append(None if ranks is None else list(ranks))
        return original(ranks, *args, **kwargs)

    distributed.new_group = recorded
    try:
        distiller = ResponseBasedDistiller(
            qwen3(1, hidden=16),
            teacher,
            args=arguments(folder, teacher_placement="sharded", fsdp_config={"cpu_ram_efficient_loading": True}),
            train_dataset=Rows(),
            data_collator=collate,
        )
    finally:
        distributed.new_group = original
    gc.collect()
    own = {id(each) for each in distiller.root.parameters()}
    sizes = {each.numel() for each in distiller._executor.teacher.parameters() if each.numel() > 500}
    whole = [each for each in gc.get_objects() if type(each) is nn.Parameter and each.numel() in sizes]
    with torch.no_grad():
        logits = distiller._executor.teacher(IDS).logits
    return {
        "groups": groups,
        "share": share(distiller._executor.teacher),
        "whole": len([each for each in whole if id(each) not in own and each.untyped_storage().nbytes()]),
        "logits": logits.tolist(),
        "rotary": distiller._executor.teacher.model.rotary_emb.inv_freq.tolist(),
    }


def uneven(folder: Path) -> dict[str, int]:
    """E-13: five rows and three rows in batches of two, one of them without a label that counts, and two epochs."""
    rows = [{key: value.clone() for key, value in row.items()} for row in Rows(n=5)]
    for row in rows[2:4]:
        row["labels"].fill_(-100)
    found = {}
    for kind in KINDS:
        distiller = make(
            kind,
            folder,
            given={"train_dataset": rows, "eval_dataset": list(Rows(n=3))},
            teacher_placement="sharded",
            alpha=0.5,
            max_steps=-1,
            num_train_epochs=2,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            eval_strategy="epoch",
            dataloader_drop_last=False,
            train_sampling_strategy="sequential",
            report_to="none",
        )
        distiller.train()
        found[kind] = len([entry for entry in distiller.state.log_history if "eval_loss" in entry])
    return found


def self_placed(folder: Path) -> dict[str, Any]:
    """B-10, B-14, J-08: maps of devices, wrappers and backends."""
    found = {}
    for kind in KINDS:
        student, teacher = qwen3(1, hidden=16), qwen3(0)
        student.hf_device_map, teacher.hf_device_map = {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}
        distiller = make(kind, folder, student=student, teacher=teacher, max_steps=3, ddp_backend="gloo")
        distiller.train()
        found[kind] = {
            "wrapped": type(distiller.model_wrapped).__name__,
            "parallel": distiller.is_model_parallel,
            "teacher": type(distiller._executor.teacher).__name__,
            "hooks": sum(len(each._backward_hooks or {}) for each in teacher.parameters()),
            "digest": sum(float(each.detach().double().abs().sum()) for each in distiller.root.parameters()),
            "backend": distributed.get_backend(),
        }
    return found


def main(folder: Path, teacher: str) -> None:
    """Run everything on this rank."""
    transformers.logging.set_verbosity_error()
    arguments(folder).device  # noqa: B018 - makes the process group
    report = {
        "no_split_modules": no_split_modules(),
        "tied": tied(),
        "tensor_parallel": tensor_parallel(),
        "captured": captured(folder),
        "mixed": mixed(folder),
        "loaded": loaded(folder, teacher),
        "uneven": uneven(folder),
        "self_placed": self_placed(folder),
    }
    (folder / f"rank-{distributed.get_rank()}.json").write_text(json.dumps(report))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
