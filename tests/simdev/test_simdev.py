"""What the simulated device does, against the same on the CPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.tiny import llama, qwen3

IDS = torch.arange(24).reshape(2, 12) % 64
MIXED = "Expected all tensors to be on the same device"


@pytest.fixture
def numbers():
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(3))


def gradients_differ_by(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((one.grad.cpu() - other.grad).abs().max().item() for one, other in pairs)


def parameters_differ_by(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((one.detach().cpu() - other.detach()).abs().max().item() for one, other in pairs)


# ---- tensors --------------------------------------------------------------------------------------------------------


def test_moves_and_multiplies(sim, numbers):
    there = numbers.to("sim:1")
    assert there.device == torch.device("sim:1")
    assert torch.equal((there @ there).cpu(), numbers @ numbers)


def test_factories_put_tensors_where_they_are_asked_to(sim):
    assert torch.arange(5, device="sim:2").device == torch.device("sim:2")
    assert torch.zeros(2, device="sim").device == torch.device("sim:0")
    assert torch.full((2,), 3.0, device="sim:1").tolist() == [3.0, 3.0]
    with sim.device(3):
        assert torch.empty(1, device="sim").device == torch.device("sim:3")
    assert torch.empty(1, device="sim").device == torch.device("sim:0")


def test_random_numbers_are_the_hosts(sim):
    torch.manual_seed(5)
    there = torch.randn(7, device="sim:3")
    torch.manual_seed(5)
    assert torch.equal(there.cpu(), torch.randn(7))


def test_mixing_devices_is_pytorchs_error(sim, numbers):
    with pytest.raises(RuntimeError, match=f"{MIXED}.*sim:0 and sim:1"):
        numbers.to("sim:0") + numbers.to("sim:1")
    with pytest.raises(RuntimeError, match=f"{MIXED}.*sim:0 and cpu"):
        numbers.to("sim:0") @ numbers
    with pytest.raises(RuntimeError, match="invalid device ordinal 4"):
        torch.empty(1, device="sim:4")


def test_copies_between_devices_are_counted(sim, numbers):
    before = sim.stats()["xdev_copies"]
    there = numbers.to("sim:0").to("sim:3")
    assert torch.equal(there.cpu(), numbers)
    assert sim.stats()["xdev_copies"] == before + 1


def test_single_numbers_on_the_host_mix_with_any_device(sim, numbers):
    factor = torch.tensor(2.0)
    product = numbers.to("sim:0") * factor
    factor.fill_(0.0)  # read when the operation was launched
    assert torch.equal(product.cpu(), 2 * numbers)


def test_functions_on_distributions_and_indices(sim, numbers):
    there = numbers.to("sim:2")
    zeros = torch.zeros(4, 1, dtype=torch.long)
    with pytest.raises(RuntimeError, match=MIXED):
        there.gather(1, zeros)
    assert torch.equal(there.gather(1, zeros.to("sim:2")).cpu(), numbers.gather(1, zeros))
    assert torch.equal(there[there > 0].cpu(), numbers[numbers > 0])
    assert torch.equal(there[torch.tensor([3, 0])].cpu(), numbers[[3, 0]])
    assert torch.equal(there.nonzero().cpu(), numbers.nonzero())
    assert torch.equal(there.topk(2).indices.cpu(), numbers.topk(2).indices)
    assert torch.equal(there.sort(dim=0).values.cpu(), numbers.sort(dim=0).values)
    divergence = functional.kl_div(there.log_softmax(-1), there.softmax(-1), reduction="batchmean")
    torch.testing.assert_close(divergence.cpu(), torch.tensor(0.0), atol=1e-6, rtol=0)


def test_in_place_out_and_views_change_the_same_memory(sim, numbers):
    there, total = numbers.to("sim:1"), torch.empty(0, device="sim:1")
    there[1].mul_(2)
    torch.sum(there, dim=1, out=total)
    here = numbers.clone()
    here[1].mul_(2)
    assert torch.equal(there.cpu(), here)
    assert torch.equal(total.cpu(), here.sum(1))
    assert torch.equal(there.t().contiguous().view(-1).cpu(), here.t().reshape(-1))


def test_storages_are_freed_and_grown_in_place(sim):
    tensor = torch.ones(8, device="sim:1")
    before = sim.memory_allocated(1)
    tensor.untyped_storage().resize_(0)
    assert sim.memory_allocated(1) == before - 32
    tensor.untyped_storage().resize_(32)
    assert tensor.fill_(2).sum().item() == 16.0


def test_pinned_memory(sim, numbers):
    pinned = numbers.pin_memory()
    assert pinned.is_pinned() and not numbers.is_pinned()
    assert torch.equal(pinned.to("sim:0", non_blocking=True).cpu(), numbers)


def test_the_accelerator_of_the_process(sim):
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 4
    assert torch.accelerator.current_device_index() == 0
    assert torch.get_device_module("sim") is sim


def test_memory_is_counted_for_each_device(sim):
    before = [sim.memory_allocated(index) for index in range(4)]
    sim.reset_peak_memory_stats(2)
    tensor = torch.empty(1000, device="sim:2")
    assert [sim.memory_allocated(index) for index in range(4)] == [*before[:2], before[2] + 4000, before[3]]
    del tensor
    assert sim.memory_allocated(2) == before[2]
    assert sim.max_memory_allocated(2) == before[2] + 4000
    assert torch.accelerator.max_memory_allocated(2) == sim.max_memory_allocated(2)
    assert sim.mem_get_info(2)[0] == sim.TOTAL_BYTES - before[2]


def test_save_and_load_keep_or_change_the_device(sim, numbers, tmp_path):
    torch.save({"x": numbers.to("sim:2")}, tmp_path / "x.pt")
    for wanted, found in ((None, "sim:2"), ("cpu", "cpu"), ("sim:3", "sim:3")):
        loaded = torch.load(tmp_path / "x.pt", map_location=wanted)["x"]
        assert loaded.device == torch.device(found)
        assert torch.equal(loaded.cpu(), numbers)


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [qwen3, llama])
def test_forward_and_backward(sim, make, attention):
    model, reference = make(3, attn_implementation=attention).to("sim:1"), make(3, attn_implementation=attention)
    output = model(input_ids=IDS.to("sim:1"), labels=IDS.to("sim:1"))
    expected = reference(input_ids=IDS, labels=IDS)
    output.loss.backward()
    expected.loss.backward()
    assert output.logits.device == torch.device("sim:1")
    torch.testing.assert_close(output.logits.cpu(), expected.logits, atol=1e-6, rtol=1e-5)
    assert gradients_differ_by(model, reference) < 1e-6


# Adam divides each gradient by its own size, so with the usual epsilon a gradient of rounding errors moves a weight as
# far as any other.
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, foreach=False),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ],
    ids=["adamw", "adamw-single", "sgd"],
)
def test_three_optimizer_steps(sim, optimizer):
    model, reference = qwen3(3).to("sim:1"), qwen3(3)
    for each, ids in ((model, IDS.to("sim:1")), (reference, IDS)):
        steps = optimizer(each.parameters())
        for _ in range(3):
            steps.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            steps.step()
    assert parameters_differ_by(model, reference) < 2e-6
    assert parameters_differ_by(model, qwen3(3)) > 1e-3


def test_autocast_and_half_precision_models(sim):
    model, ids = qwen3(3).to("sim:1"), IDS.to("sim:1")
    expected = qwen3(3)(input_ids=IDS, labels=IDS).loss
    with torch.autocast("sim", dtype=torch.bfloat16):
        output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    assert output.logits.dtype == torch.bfloat16
    assert next(model.parameters()).grad.dtype == torch.float32
    torch.testing.assert_close(output.loss.cpu(), expected, atol=0.02, rtol=0)
    assert model.to(torch.bfloat16)(input_ids=ids).logits.dtype == torch.bfloat16


def test_activation_checkpointing(sim):
    model, reference = qwen3(3).to("sim:1").train(), qwen3(3).train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model(input_ids=IDS.to("sim:1"), labels=IDS.to("sim:1")).loss.backward()
    reference(input_ids=IDS, labels=IDS).loss.backward()
    assert gradients_differ_by(model, reference) < 1e-6


def test_generate(sim):
    settings = {"max_new_tokens": 4, "do_sample": False}
    there = qwen3(3).eval().to("sim:1").generate(IDS.to("sim:1"), **settings)
    assert torch.equal(there.cpu(), qwen3(3).eval().generate(IDS, **settings))


def test_from_pretrained_with_a_device_map(sim, tmp_path):
    from transformers import AutoModelForCausalLM

    qwen3(3).to("sim:1").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "sim:2"})
    assert {parameter.device for parameter in model.parameters()} == {torch.device("sim:2")}
    assert parameters_differ_by(model, qwen3(3)) == 0


# ---- accelerate over several devices --------------------------------------------------------------------------------


def layer_each(model: nn.Module) -> nn.Module:
    """Put one decoder layer on each of four devices."""
    from accelerate import dispatch_model

    places = {"model.embed_tokens": "sim:0", "model.rotary_emb": "sim:0", "model.norm": "sim:3", "lm_head": "sim:3"}
    places |= {f"model.layers.{index}": f"sim:{index}" for index in range(4)}
    return dispatch_model(model, places, main_device="sim:0")


def test_dispatched_forward_and_backward(sim):
    before = sim.stats()["xdev_copies"]
    model, reference = layer_each(qwen3(3)), qwen3(3)
    assert [str(next(layer.parameters()).device) for layer in model.model.layers] == [f"sim:{i}" for i in range(4)]
    output = model(input_ids=IDS.to("sim:0"), labels=IDS.to("sim:0"))
    assert output.logits.device == torch.device("sim:0")
    assert sim.stats()["xdev_copies"] > before
    expected = reference(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(output.logits.cpu(), expected.logits, atol=1e-6, rtol=1e-5)
    output.loss.backward()
    expected.loss.backward()
    assert gradients_differ_by(model, reference) < 1e-6


def test_device_maps_are_inferred_without_a_gpu(sim):
    from accelerate import infer_auto_device_map

    model = qwen3(3)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    room = {0: size // 2, 1: size, "cpu": 0}
    found = infer_auto_device_map(model, max_memory=room, no_split_module_classes=["Qwen3DecoderLayer"])
    assert set(found.values()) == {0, 1}
