"""Teachers that manage their own devices or cannot be cast: dispatched, offloaded, quantised; and overlap on CPU."""

import gc
import json

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor, nn

from silverspoon_kd.capture import Capture, Tap, Trace
from silverspoon_kd.errors import PlacementError
from silverspoon_kd.teacher.hygiene import check_not_quantised, freeze_teacher
from silverspoon_kd.teacher.sharding import shard_frozen
from silverspoon_kd.teacher.world.pipeline import pipeline_map
from silverspoon_kd.teacher.world.strategies import check_source
from support.distil import KINDS, make, training_logs
from support.more_models import bert, gpt2
from support.tiny import arguments, distance, llama, qwen3, weights

every_kind = pytest.mark.parametrize("kind", KINDS)
OPTIONS = {"max_steps": 2, "learning_rate": 1.0, "report_to": "none"}


def offloaded(model: nn.Module, folder, *on_disk: str) -> nn.Module:
    """Dispatch over the CPU and the disk."""
    named = {name for name, _ in model.named_children()} - {"model", "transformer"}
    inner = next(each for each in ("model", "transformer") if each in dict(model.named_children()))
    layers = "layers" if inner == "model" else "h"
    children = dict(getattr(model, inner).named_children())
    named |= {f"{inner}.{name}" for name in children if name != layers}
    named |= {f"{inner}.{layers}.{index}" for index in range(len(children[layers]))}
    device_map = {name: "disk" if name in on_disk else "cpu" for name in sorted(named)}
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def refuse_casts(model: nn.Module, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("a teacher that places itself was moved or cast")

    for name in ("to", "half", "float", "bfloat16", "cuda", "cpu", "double"):
        monkeypatch.setattr(model, name, refuse)


@every_kind
def test_b_01_b_07_an_offloaded_teacher_stays_where_it_is(kind, tmp_path, monkeypatch):
    """Every second layer lies on disk, so that rotary tables cross with the hidden states."""
    plain = make(kind, tmp_path / "plain", **OPTIONS)
    plain.train()
    teacher = offloaded(qwen3(0), tmp_path / "disk", "model.layers.1", "model.layers.3")
    places = dict(teacher.hf_device_map)
    where = {name: each.device.type for name, each in teacher.named_parameters()}
    assert set(where.values()) == {"cpu", "meta"}
    refuse_casts(teacher, monkeypatch)
    distiller = make(kind, tmp_path / "offloaded", teacher=teacher, **OPTIONS)
    distiller.train()
    assert teacher.hf_device_map == places
    assert {name: each.device.type for name, each in teacher.named_parameters()} == where
    for found, expected in zip(training_logs(distiller), training_logs(plain), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert distance(weights(distiller.root), weights(plain.root)) < 1e-6


def test_b_07_rotary_tables_cross_with_the_hidden_states(tmp_path):
    expected, teacher = qwen3(0), offloaded(qwen3(0), tmp_path, "model.layers.0", "model.layers.2", "model.rotary_emb")
    ids = torch.arange(1, 13).view(2, 6)
    taps = [Tap(f"model.layers.{index}", selector=None) for index in range(4)]
    found = []
    for model in (expected, teacher):
        capture = Capture(model, taps, Trace())
        with torch.no_grad():
            capture.run(lambda model=model: model(ids), may_stop=False)
        found.append(capture.values)
    assert all(torch.allclose(found[0][tap], found[1][tap], atol=1e-6) for tap in taps)


def test_b_04_a_tied_teacher_in_two_places(tmp_path):
    plain = gpt2(3)
    assert plain.lm_head.weight is plain.transformer.wte.weight
    ids = torch.arange(1, 13).view(2, 6)
    with torch.no_grad():
        expected = plain.eval()(ids).logits
        found = offloaded(gpt2(3), tmp_path, "lm_head").eval()(ids).logits
    assert torch.allclose(found, expected, atol=1e-6)


def bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=4, n_head=2, vocab_size=64))


@pytest.mark.parametrize(
    ("make_model", "blocks"),
    [
        (lambda: llama(layers=4), "model.layers"),
        (lambda: gpt2(n_layer=4), "transformer.h"),
        (lambda: bert(num_hidden_layers=4), "encoder.layer"),
        (bloom, "transformer.h"),
    ],
    ids=["llama", "gpt2", "bert", "bloom"],
)
@pytest.mark.parametrize("named", [True, False], ids=["blocks-named", "blocks-not-named"])
def test_b_02_b_03_only_the_teachers_devices_and_whole_blocks(make_model, blocks, named):
    with torch.device("meta"):
        model = make_model()
    if not named:
        model._no_split_modules = None
    found = pipeline_map(model, ["sim:2", "sim:3"])
    assert set(found.values()) == {"sim:2", "sim:3"}

    def device_of(name):
        return next(device for key, device in found.items() if key in ("", name) or name.startswith(key + "."))

    for index in range(4):
        names = [name for name, _ in model.named_parameters() if name.startswith(f"{blocks}.{index}.")]
        assert names and len({device_of(name) for name in names}) == 1
    # Both names of a tied weight are on one device.
    places: dict[int, set[str]] = {}
    for name, each in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        places.setdefault(id(each), set()).add(device_of(name))
    assert all(len(devices) == 1 for devices in places.values())


@pytest.mark.parametrize("placement", [None, "replicated"])
def test_b_09_the_teacher_is_on_the_students_device(placement, tmp_path):
    distiller = make("holistic", tmp_path, teacher_placement=placement)
    found = [*distiller.teacher.parameters(), *distiller.teacher.buffers()]
    assert {each.device for each in found} == {distiller.args.device}


@every_kind
def test_b_10_device_maps_of_one_device_do_not_make_a_model_parallel(kind, tmp_path):
    student, teacher = qwen3(1, hidden=16), qwen3(0)
    student.hf_device_map = {"": "cpu"}
    teacher.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    distiller = make(kind, tmp_path, student=student, teacher=teacher, max_steps=1)
    assert distiller.is_model_parallel is False
    distiller.train()


@every_kind
def test_b_11_never_data_parallel(kind, tmp_path, caplog, monkeypatch):
    args = arguments(tmp_path, max_steps=1)
    _ = args.device
    args._n_gpu = 4
    monkeypatch.setattr("support.distil.arguments", lambda *_, **__: args)
    distiller = make(kind, tmp_path)
    assert distiller.args.n_gpu == 1
    assert "torchrun --nproc_per_node=4" in caplog.text
    distiller.train()
    assert not isinstance(distiller.model_wrapped, nn.DataParallel)


class Packed(nn.Module):
    """A linear layer whose weights are 8-bit integers; scaled when it runs."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.scale = float(plain.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((plain.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T


def quantised() -> nn.Module:
    model = qwen3(0)
    for layer in model.model.layers:
        layer.mlp.up_proj = Packed(layer.mlp.up_proj)
    model.is_quantized = True
    return model


@every_kind
def test_b_12_a_quantised_teacher_is_neither_moved_nor_cast(kind, tmp_path, monkeypatch):
    teacher = quantised()
    dtypes = {name: each.dtype for name, each in teacher.state_dict().items()}
    assert torch.int8 in dtypes.values()
    refuse_casts(teacher, monkeypatch)
    distiller = make(kind, tmp_path, teacher=teacher, teacher_placement="replicated", **OPTIONS)
    distiller.train()
    assert {name: each.dtype for name, each in teacher.state_dict().items()} == dtypes
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(entry["loss"] > 0 for entry in training_logs(distiller))


def test_b_12_a_quantised_teacher_cannot_be_sharded():
    teacher = quantised()
    freeze_teacher(teacher)
    with pytest.raises(PlacementError, match="of the quantised teacher Qwen3ForCausalLM cannot be divided"):
        shard_frozen(teacher, mesh=None, device=None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("strategy", ["tp", "sharded"])
def test_b_12_packed_weights_are_not_divided_and_nothing_is_loaded_first(strategy, tmp_path):
    described = qwen3(0).config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    described["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(described))  # and no weights
    eight_bit = torch.ao.quantization.quantize_dynamic(qwen3(0).eval(), {nn.Linear}, dtype=torch.qint8)
    for source in (str(tmp_path), quantised(), eight_bit):
        with pytest.raises(
            PlacementError, match=rf"strategy='{strategy}' divides every weight, but the packed weights"
        ):
            check_source(source, strategy, 2)
        check_source(source, "pp", 2)
        check_source(source, "sharded", 1)
    with pytest.raises(PlacementError, match="teacher_placement='sharded' divides every weight"):
        check_not_quantised(str(tmp_path), "teacher_placement='sharded'")
    check_source(qwen3(0), strategy, 2)
    check_source(lambda: None, strategy, 2)


@pytest.mark.parametrize("name", ["gpt2", "bert", "bloom"])
def test_e_18_no_tensor_parallel_plan(name, tmp_path):
    model = {"gpt2": gpt2, "bert": bert, "bloom": bloom}[name]()
    model.save_pretrained(tmp_path)
    for source in (model, str(tmp_path)):
        with pytest.raises(ValueError, match="has no _tp_plan"):
            check_source(source, "tp", 2)
        check_source(source, "pp", 2)


def test_e_18_heads_that_do_not_divide_are_found_before_anything_is_loaded(tmp_path):
    llama(num_attention_heads=3, num_key_value_heads=3, hidden=24).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not even weights")
    with pytest.raises(ValueError, match="num_attention_heads=3 of LlamaForCausalLM does not divide"):
        check_source(str(tmp_path), "tp", 2)
    check_source(str(tmp_path), "tp", 3)


@every_kind
def test_j_05_overlap_makes_no_difference_on_cpu(kind, tmp_path, caplog):
    found = []
    for overlap in (None, True, False):
        caplog.clear()
        distiller = make(kind, tmp_path, overlap_teacher_forward=overlap, **OPTIONS)
        distiller.train()
        warned = [each for each in caplog.records if "overlap" in each.getMessage()]
        assert len(warned) <= (1 if overlap else 0)
        found.append(([entry["loss"] for entry in training_logs(distiller)], weights(distiller.root)))
    for losses, after in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(after[name], value) for name, value in found[0][1].items())
    gc.collect()
