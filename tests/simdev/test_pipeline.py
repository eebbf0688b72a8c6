"""A teacher whose layers are spread over several devices gives what it gives on one."""

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from silverspoon_kd import Alignment
from silverspoon_kd.capture import Capture, Tap, Trace, base_of, select_logits
from silverspoon_kd.objectives.positions import Positions
from silverspoon_kd.objectives.terms import alignment_term
from silverspoon_kd.teacher.world.spec import WorldSpec
from silverspoon_kd.teacher.world.strategies import place_pipeline
from silverspoon_kd.tree import tensors_in
from support.more_models import gpt2
from support.tiny import llama, qwen3

# Asynchronous, as accelerators are; both modes of the device itself: test_simdev.py, test_streams.py.
pytestmark = pytest.mark.parametrize("sim", ["async"], indirect=True)

IDS = torch.arange(24).reshape(2, 12) % 63 + 1
MASK = (torch.arange(12) < torch.tensor([[12], [7]])).long()


def uneven_qwen3() -> nn.Module:
    """The first of five layers is larger than all others together."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    model = qwen3(3, layers=5)
    wide = qwen3(4, layers=1, intermediate_size=1024)
    model.model.layers[0].mlp = Qwen3MLP(wide.config)
    return model


def with_adapters() -> nn.Module:
    """Qwen3 with LoRA that changes what it gives out."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(qwen3(3), LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))


MODELS = {
    "qwen3": lambda: qwen3(3),
    "llama": lambda: llama(3),
    "tied": lambda: qwen3(3, tie_word_embeddings=True),
    "gpt2": lambda: gpt2(3, n_layer=4, vocab_size=64),
    "five-layers": lambda: qwen3(3, layers=5),
    "seven-layers": lambda: llama(3, layers=7),
    "uneven-layers": uneven_qwen3,
    "adapters": with_adapters,
}


def spec_of(devices: tuple[int, ...]) -> WorldSpec:
    return WorldSpec(
        source="", taps=(), strategy="pp", device_type="sim", devices=devices, cores=(), wrap_cls=None, autocast=None,
        num_students=1, example=None, timeout=60, load_timeout=60, search_path=(),
    )  # fmt: skip


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder layers by name."""
    modules = base_of(model).named_modules()
    found = next((name, module) for name, module in modules if isinstance(module, nn.ModuleList))
    return {f"{found[0]}.{index}": layer for index, layer in enumerate(found[1])}


def run(model: nn.Module, taps: list[Tap], device: str) -> dict[Tap, Tensor]:
    """Run a forward and return what was recorded."""
    capture = Capture(model, taps, Trace())
    with torch.no_grad():
        capture.run(lambda: model(input_ids=IDS.to(device), attention_mask=MASK.to(device)), may_stop=False)
    return capture.values


def bytes_of(model: nn.Module, device: torch.device | None = None) -> int:
    """The bytes of a model's parameters and buffers (on one device), each memory counted once."""
    tensors = [each for each in [*model.parameters(), *model.buffers()] if device in (None, each.device)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def check_placed(sim, make, numbers: tuple[int, ...]) -> nn.Module:
    """Spread a model, and compare everything that it gives out and holds with the model on the CPU."""
    devices = [torch.device("sim", index) for index in numbers]
    gc.collect()  # the hooks of models of earlier tests hold them in circles
    before = [sim.memory_allocated(index) for index in range(sim.device_count())]
    reference, model = make().eval(), make().eval()
    taps = [Tap(name, side) for name in layers_of(model) for side in ("input", "output")]
    taps += [Tap("", "output", select_logits)]
    expected = run(reference, taps, "cpu")
    model = place_pipeline(model, spec_of(numbers), 0)
    sim.set_race_check(2)
    held = {device: sim.memory_allocated(device) - before[device.index] for device in devices}
    for device in devices:
        sim.reset_peak_memory_stats(device)
    found = run(model, taps, str(devices[0]))
    for tap in taps:
        torch.testing.assert_close(found[tap].cpu(), expected[tap], atol=1e-6, rtol=1e-5)
    placed = [{each.device for each in tensors_in(list(layer.parameters()))} for layer in layers_of(model).values()]
    assert all(len(each) == 1 for each in placed), placed
    order = [each.pop().index for each in placed]
    assert order == sorted(order, key=numbers.index)
    used = {each.device for each in [*model.parameters(), *model.buffers()]}
    # A layer larger than all others together leaves the last devices without work.
    assert used == set(devices) if make is not uneven_qwen3 else used <= set(devices)
    for (name, layer), index in zip(layers_of(model).items(), order, strict=True):
        assert found[Tap(name)].device == torch.device("sim", index), name
        assert next(layer.parameters()).device == torch.device("sim", index)
    for index in set(range(sim.device_count())) - set(numbers):
        assert sim.memory_allocated(index) == before[index]
    print("device  layers  parameters and buffers  peak of a forward")
    for device in devices:
        own, peak = bytes_of(model, device), sim.max_memory_allocated(device) - before[device.index]
        print(f"{device}  {order.count(device.index):7}  {own:22,}  {peak:17,}")
        assert held[device] == own
        assert peak >= own
    largest = max(bytes_of(part) for part in [*layers_of(model).values(), model.get_input_embeddings()])
    most = bytes_of(model) / len(devices) + largest
    assert all(bytes_of(model, device) <= most for device in devices)
    assert sim.races() == []
    return model


@pytest.mark.parametrize("numbers", [(1, 2), (0, 1, 2, 3)], ids=["two", "four"])
@pytest.mark.parametrize("name", MODELS)
def test_b_03_each_layer_is_whole_and_gives_the_same(sim, name, numbers):
    check_placed(sim, MODELS[name], numbers)


@pytest.mark.parametrize("name", ["qwen3", "tied", "gpt2"])
def test_one_device(sim, name):
    check_placed(sim, MODELS[name], (2,))


@pytest.mark.parametrize("name", ["tied", "gpt2"])
@pytest.mark.parametrize("numbers", [(1, 2), (0, 1, 2, 3)], ids=["two", "four"])
def test_b_04_tied_embeddings_stay_one_tensor(sim, name, numbers):
    model = check_placed(sim, MODELS[name], numbers)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("make", [qwen3, llama])
def test_b_07_rotary_tables_are_where_the_layer_is(sim, make):
    model = check_placed(sim, make, (1, 2, 3))
    seen: dict[str, set[torch.device]] = {}

    def note(name: str):
        def hook(module, args, kwargs):
            seen[name] = {each.device for each in tensors_in([list(args), dict(kwargs)])}

        return hook

    # The attention inside: accelerate moves what the layer gets in a wrapper that hooks on the layer come before.
    for name, layer in layers_of(model).items():
        layer.self_attn.register_forward_pre_hook(note(name), with_kwargs=True)
    reference = make().eval()
    assert torch.equal(model.model.rotary_emb.inv_freq.cpu(), reference.model.rotary_emb.inv_freq)
    run(model, [], "sim:1")
    assert seen == {name: {next(layer.parameters()).device} for name, layer in layers_of(model).items()}


class OnlyCopiesFrom(TorchDispatchMode):
    """Refuse every operation on tensors of some devices but the copy away from them."""

    def __init__(self, devices: set[torch.device]) -> None:
        super().__init__()
        self._devices, self.copies = devices, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        inputs = {each.device for each in tensors_in([list(args), dict(kwargs or {})])}
        outputs = {each.device for each in tensors_in([result])}
        if (inputs | outputs) & self._devices:
            moves = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
            assert moves and not outputs & self._devices, f"{function} on {inputs} gives {outputs}"
            self.copies += 1
        return result


@pytest.mark.parametrize(
    "loss", ["mse", "cosine", "kl_divergence", "relkd_distance_angle", "mahalanobis_mse", "contrastive", "cka"]
)
def test_b_08_the_loss_is_on_the_students_device(sim, loss):
    sim.set_race_check(2)
    values = [torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]

    def term(student_device: str, teacher_device: str):
        student, teacher = values[0].clone().to(student_device).requires_grad_(), values[1].to(teacher_device)
        positions = Positions(
            rows=2,
            masks={unit: MASK.bool().to(student_device) for unit in ("tokens", "targets")},
            num_task=torch.tensor(2, device=student_device),
        )
        alignment = Alignment("model.layers.0", "model.layers.0", loss_function=loss)
        with OnlyCopiesFrom({torch.device(teacher_device)} - {torch.device(student_device)}) as watch:
            found = alignment_term("layer", alignment, student, teacher, positions)
            found.total.backward()
        return found, student, watch.copies

    expected, reference, _ = term("cpu", "cpu")
    found, student, copies = term("sim:0", "sim:3")
    assert copies == 1
    assert found.total.device == student.device == student.grad.device == torch.device("sim:0")
    torch.testing.assert_close(found.total.cpu(), expected.total, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(student.grad.cpu(), reference.grad, atol=1e-6, rtol=1e-4)
    assert sim.races() == []
