import json
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file, save_model
from torch import nn

from silverspoon_kd import (
    HolisticDistiller,
    create_alignments,
    load_student_weights_from_checkpoint,
    load_student_with_projectors_from_checkpoint,
)
from silverspoon_kd.errors import CheckpointError
from support.more_models import gpt2, resnet
from support.tiny import Rows, arguments, collate, llama, qwen3

LINEAR = {"kind": "linear", "in": 6, "out": 4, "bias": True}
CONV = {"kind": "conv2d", "in": 3, "out": 5, "bias": False}


def _record(**changes) -> dict:
    modules = {"teacher_module": "model.layers.1", "student_module": "model.layers.0"}
    alignments = [
        {"name": "none", **modules, "input_projector": None, "output_projector": None},
        {"name": "model.layers.0", **modules, "input_projector": LINEAR, "output_projector": CONV},
        {"name": "out", **modules, "input_projector": None, "output_projector": {**LINEAR, "bias": False}},
    ]
    return {"format": 1, "alignments": alignments, **changes}


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "1.input.weight": torch.randn(4, 6),
        "1.input.bias": torch.randn(4),
        "1.output.weight": torch.randn(5, 3, 1, 1),
        "2.output.weight": torch.randn(4, 6),
    }


def _checkpoint(folder, student=None, record=None, tensors=None):
    (student or llama(seed=1, layers=2)).save_pretrained(folder)
    (folder / "distillation.json").write_text(json.dumps(record or _record()))
    save_file(tensors or _tensors(), folder / "projectors.safetensors")
    return folder


def _same(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    "build",
    [
        lambda seed: llama(seed, layers=2),
        lambda seed: llama(seed, layers=2, tie_word_embeddings=True),
        lambda seed: qwen3(seed, layers=2),
        gpt2,
        resnet,
    ],
)
def test_weights_of_real_models(tmp_path, build):
    saved, student = build(1), build(2)
    assert not _same(saved, student)
    saved.save_pretrained(tmp_path)
    assert load_student_weights_from_checkpoint(student, tmp_path) is student
    assert _same(saved, student)


def test_shards(tmp_path):
    saved, student = llama(1), llama(2)
    saved.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    load_student_weights_from_checkpoint(student, tmp_path)
    assert _same(saved, student)
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match="has no model-00002-of"):
        load_student_weights_from_checkpoint(llama(2), tmp_path)


def test_parameters_stay_the_same_objects_in_dtype_and_flags(tmp_path):
    saved = llama(1)
    saved.save_pretrained(tmp_path)
    student = llama(2).to(torch.bfloat16)
    student.lm_head.weight.requires_grad_(False)
    before = list(student.parameters())
    load_student_weights_from_checkpoint(student, tmp_path)
    assert all(one is other for one, other in zip(before, student.parameters(), strict=True))
    assert student.dtype == torch.bfloat16
    assert not student.lm_head.weight.requires_grad
    torch.testing.assert_close(student.lm_head.weight.float(), saved.lm_head.weight, rtol=1e-2, atol=1e-3)


class _Tied(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.one = nn.Linear(3, width)
        self.two = nn.Linear(3, width)
        self.two.weight = self.one.weight


def test_plain_module_with_tied_weights(tmp_path):
    torch.manual_seed(0)
    saved, student = _Tied(), _Tied()
    save_model(saved, str(tmp_path / "model.safetensors"))
    load_student_weights_from_checkpoint(student, tmp_path)
    assert _same(saved, student)
    with pytest.raises(CheckpointError, match=r"'one.bias' is \[3\] there and \[4\] here"):
        load_student_weights_from_checkpoint(_Tied(width=4), tmp_path)
    with pytest.raises(CheckpointError, match="it lacks '0.weight'"):
        load_student_weights_from_checkpoint(nn.Sequential(nn.Linear(3, 3)), tmp_path)
    save_file(
        {**saved.state_dict(), "two.weight": torch.ones(3, 3), "three": torch.ones(1)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match="unknown 'three'"):
        load_student_weights_from_checkpoint(student, tmp_path)


@pytest.mark.parametrize(
    ("student", "message"),
    [
        (lambda: llama(layers=3), "lacks 'model.layers.2"),
        (lambda: llama(layers=1), "unknown 'model.layers.1"),
        (lambda: llama(layers=2, hidden=16), r"is \[\d+.*\] there and \[\d+"),
        (lambda: gpt2(), "lacks|unknown"),
    ],
)
def test_weights_of_another_model_are_refused_and_change_nothing(tmp_path, student, message):
    llama(1, layers=2).save_pretrained(tmp_path)
    model = student()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load_student_weights_from_checkpoint(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("build", [lambda: llama(layers=2), _Tied])
def test_missing_and_truncated_weights(tmp_path, build):
    with pytest.raises(CheckpointError, match="is no folder"):
        load_student_weights_from_checkpoint(build(), tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors; it has \[\]"):
        load_student_weights_from_checkpoint(build(), tmp_path)
    save_model(build(), str(tmp_path / "model.safetensors"))
    whole = (tmp_path / "model.safetensors").read_bytes()
    for part in (whole[:-7], whole[:20], b""):
        (tmp_path / "model.safetensors").write_bytes(part)
        with pytest.raises(CheckpointError, match="truncated"):
            load_student_weights_from_checkpoint(build(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}')
    with pytest.raises(CheckpointError, match="index.json cannot be read.*may be truncated"):
        load_student_weights_from_checkpoint(build(), tmp_path)


def _lora(seed, rank=4):
    model = llama(1, layers=2)
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj"], init_lora_weights=False))


def test_adapters_of_a_lora_student(tmp_path):
    saved, student = _lora(2), _lora(3)
    assert not _same(saved, student)
    saved.save_pretrained(tmp_path)
    assert load_student_weights_from_checkpoint(student, tmp_path) is student
    assert _same(saved, student)
    other = _lora(3, rank=2)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"not those of this LlamaForCausalLM: '.*lora_A.* is \[4, 32\] there"):
        load_student_weights_from_checkpoint(other, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors for the adapter 'default'"):
        load_student_weights_from_checkpoint(student, tmp_path)


class _Trap:
    def __reduce__(self):
        return (pytest.fail, ("a file was unpickled",))


def test_nothing_is_unpickled(tmp_path):
    for name in ("pytorch_model.bin", "model.safetensors", "projectors.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(_Trap()))
    (tmp_path / "distillation.json").write_text(json.dumps(_record()))
    for load in (load_student_weights_from_checkpoint, load_student_with_projectors_from_checkpoint):
        with pytest.raises(CheckpointError):
            load(llama(layers=2), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        load_student_weights_from_checkpoint(llama(layers=2), tmp_path)


def test_projectors_compute_what_was_saved(tmp_path):
    saved = llama(1, layers=2)
    student, projectors = load_student_with_projectors_from_checkpoint(llama(2, layers=2), _checkpoint(tmp_path, saved))
    assert _same(saved, student)
    tensors = _tensors()
    assert projectors["none"] == {"input": None, "output": None}
    assert projectors["out"]["input"] is None
    x, image = torch.randn(2, 6), torch.randn(2, 3, 4, 4)
    aligned = projectors["model.layers.0"]
    torch.testing.assert_close(aligned["input"](x), x @ tensors["1.input.weight"].T + tensors["1.input.bias"])
    pixels = torch.einsum("oi,bihw->bohw", tensors["1.output.weight"][:, :, 0, 0], image)
    torch.testing.assert_close(aligned["output"](image), pixels)
    torch.testing.assert_close(projectors["out"]["output"](x), x @ tensors["2.output.weight"].T)
    assert all(parameter.requires_grad for parameter in aligned["input"].parameters())


def test_projector_dtype_is_the_saved_one(tmp_path):
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in _tensors().items()}
    _, projectors = load_student_with_projectors_from_checkpoint(
        llama(layers=2), _checkpoint(tmp_path, tensors=tensors)
    )
    assert projectors["out"]["output"].weight.dtype == torch.bfloat16


def test_without_projectors_no_file_is_needed(tmp_path):
    record = _record()
    record["alignments"] = record["alignments"][:1]
    _checkpoint(tmp_path, record=record)
    (tmp_path / "projectors.safetensors").unlink()
    _, projectors = load_student_with_projectors_from_checkpoint(llama(layers=2), tmp_path)
    assert projectors == {"none": {"input": None, "output": None}}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (_record(format=2), "format 2, but this version reads format 1"),
        ({"format": 1}, "format 1"),
        ([], "not an object"),
        (_record(alignments=[{"teacher_module": "a"}]), "no name of its own"),
        (_record(alignments=_record()["alignments"][:1] * 2), "no name of its own"),
        (
            _record(alignments=[{"name": "a", "input_projector": {"kind": "custom", "class": "Mine"}}]),
            "custom.*yourself",
        ),
        (_record(alignments=[{"name": "a", "input_projector": {**LINEAR, "kind": "pickle"}}]), "cannot be built here"),
        (_record(alignments=[{"name": "a", "input_projector": {**LINEAR, "in": "x"}}]), "cannot be built here"),
        (_record(alignments=[{"name": "a", "input_projector": LINEAR}]), "does not hold the projectors"),
    ],
)
def test_foreign_records_are_refused(tmp_path, record, message):
    _checkpoint(tmp_path)
    (tmp_path / "distillation.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=message):
        load_student_with_projectors_from_checkpoint(llama(layers=2), tmp_path)


def test_missing_and_truncated_projectors(tmp_path):
    path = _checkpoint(tmp_path) / "projectors.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="truncated"):
        load_student_with_projectors_from_checkpoint(llama(layers=2), tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"projectors\.safetensors is missing"):
        load_student_with_projectors_from_checkpoint(llama(layers=2), tmp_path)
    (tmp_path / "distillation.json").unlink()
    with pytest.raises(CheckpointError, match="not saved by a distiller"):
        load_student_with_projectors_from_checkpoint(llama(layers=2), tmp_path)


def test_what_a_distiller_saves_is_read(tmp_path):
    teacher, student = qwen3(1, layers=2), qwen3(2, layers=2, hidden=16)
    alignments = create_alignments(teacher, student, r"model\.layers\.\d+", "mse", output_selector_index=0)
    distiller = HolisticDistiller(
        teacher_model=teacher,
        alignments=alignments,
        train_dataset=Rows(4),
        data_collator=collate,
        args=arguments(tmp_path, max_steps=1),
    )
    distiller.train()
    distiller.save_model(str(tmp_path / "saved"))
    loaded, projectors = load_student_with_projectors_from_checkpoint(qwen3(3, layers=2, hidden=16), tmp_path / "saved")
    assert _same(distiller.student_model, loaded)
    assert len(projectors) == 2
    for index, sides in enumerate(projectors.values()):
        assert sides["input"] is None
        saved = distiller.root.projectors[index].output
        assert torch.equal(sides["output"].weight, saved.weight)
        assert sides["output"].weight.shape == (32, 16)
