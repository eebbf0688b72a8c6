"""Clean names find their modules through every wrapper."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from silverspoon_kd import create_alignments
from silverspoon_kd.capture import base_of, clean_name, find_module, named_modules
from silverspoon_kd.errors import AlignmentError
from support.tiny import llama, qwen3


@contextmanager
def one_rank(folder) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Sharded(nn.Module):
    """What FSDP1, which refuses a machine without accelerator, inserts into names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *args, **kwargs):
        return self._fsdp_wrapped_module(*args, **kwargs)


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Qwen3DecoderLayer))
    return model


def sharded(model: nn.Module) -> nn.Module:
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = Sharded(layer)
    return Sharded(model)


def sharded_and_checkpointed(model: nn.Module) -> nn.Module:
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = Sharded(checkpoint_wrapper(layer))
    return Sharded(model)


def adapted(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "checkpointed": checkpointed,
    "ddp": nn.parallel.DistributedDataParallel,
    "data_parallel": nn.DataParallel,
    "sharded": sharded,
    "sharded_and_checkpointed": sharded_and_checkpointed,
    "compiled_ddp": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
    "lora": adapted,
    "compiled_lora": lambda model: torch.compile(adapted(model), backend="eager"),
}


def tiny(seed: int = 0) -> nn.Module:
    return qwen3(seed, layers=2, hidden=16)


@pytest.mark.parametrize("name", WRAPPERS)
def test_e_08_names_are_clean_through_wrappers(tmp_path, name: str) -> None:
    model = tiny()
    clean, layers = [each for each, _ in model.named_modules() if each], list(model.model.layers)
    with one_rank(tmp_path):
        student = WRAPPERS[name](model)
        found = create_alignments(tiny(1), student, r"model\.layers\.\d+", output_selector_index=0)
        assert [each.student_module_name for each in found] == ["model.layers.0", "model.layers.1"]
        assert [each.teacher_module_name for each in found] == ["model.layers.0", "model.layers.1"]
        assert base_of(student) is model
        names = [each for each, _ in named_modules(student)]
        if "lora" in name:
            assert set(clean) < set(names)
        else:
            assert names == clean
        for index, layer in enumerate(layers):
            outside = find_module(student, f"model.layers.{index}")
            assert layer in outside.modules()
            assert find_module(student, f"model.layers.{index}.mlp.up_proj") is layer.mlp.up_proj


def test_e_08_a_wrapped_layer_is_found_on_its_outside() -> None:
    student = sharded_and_checkpointed(tiny())
    outside = find_module(student, "model.layers.0")
    assert isinstance(outside, Sharded)
    assert dict(named_modules(student))["model.layers.0"] is outside


def test_clean_name() -> None:
    assert clean_name("_orig_mod._fsdp_wrapped_module.a.0._checkpoint_wrapped_module.b") == "a.0.b"
    assert clean_name("module.a_orig_mod") == "module.a_orig_mod"
    assert clean_name("_orig_mod") == ""


def test_a_module_of_the_users_own_may_be_called_module() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert find_module(model, "module") is model.module
    assert base_of(model) is model


def test_the_empty_name_is_the_model_itself() -> None:
    model = tiny()
    assert find_module(torch.compile(model, backend="eager"), "") is model


def test_unknown_names_are_refused_with_a_near_one() -> None:
    with pytest.raises(AlignmentError, match=r"LlamaForCausalLM has no module 'model\.layer\.0'.*model\.layers\.0'"):
        find_module(llama(layers=2, hidden=16), "model.layer.0")
    with pytest.raises(AlignmentError, match=r"no module 'model\.layers\.7'"):
        find_module(checkpointed(tiny()), "model.layers.7")
