"""One forward with hooks: what is recorded, what is replaced, where it ends, and that nothing stays behind."""

import gc
import weakref

import pytest
import torch
from torch import nn

from silverspoon_kd.capture import Capture, Tap, Trace
from silverspoon_kd.errors import AlignmentError, TrainingError
from support.architectures import ARCHITECTURES, bert
from support.by_hand import features
from support.tiny import llama, qwen3

IDS = torch.randint(1, 60, (2, 6), generator=torch.Generator().manual_seed(0))


def tiny(**changes) -> nn.Module:
    return qwen3(**{"layers": 3, "hidden": 16, **changes})


def ran(model: nn.Module) -> list[str]:
    """From now on, the names of the modules that ran."""
    calls: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


def hooks(model: nn.Module) -> int:
    """All hooks on the model, and the ones torch has for all modules."""
    everywhere = torch.nn.modules.module
    own = [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in model.modules()]
    return sum(len(each) for kinds in own for each in kinds) + sum(
        len(each) for each in (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks)
    )


def run(model: nn.Module, taps: list[Tap], trace: Trace | None = None, stop: bool = True, **substitute):
    capture = Capture(model, taps, trace or Trace(), substitute.get("substitute"))
    output, kept = capture.run(lambda: model(input_ids=IDS), may_stop=stop)
    return capture.values, output, kept


# --- recording -------------------------------------------------------------------------------------------------------


def test_inputs_and_outputs_are_those_of_the_module() -> None:
    model = tiny()
    names = ["model.layers.0", "model.layers.2"]
    taken, given, wanted = features(model, names, {"input_ids": IDS})
    taps = [Tap(name, side) for name in names for side in ("input", "output")]
    values, output, kept = run(model, [*taps, Tap("", "output", "logits")])
    for name in names:
        torch.testing.assert_close(values[Tap(name, "input")], taken[name])
        torch.testing.assert_close(values[Tap(name, "output")], given[name])
    assert values[Tap("", "output", "logits")] is output.logits
    torch.testing.assert_close(output.logits, wanted.logits)
    assert kept == []


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_g_10_the_last_layer_is_not_the_last_hidden_state(name: str) -> None:
    model = {"llama": lambda: llama(layers=2, hidden=16), "bert": lambda: bert(0)}[name]().eval()
    last = {"llama": "model.layers.1", "bert": "bert.encoder.layer.1"}[name]
    values, _, _ = run(model, [Tap(last)], stop=False)
    hidden = model(input_ids=IDS, output_hidden_states=True).hidden_states[-1]
    own = features(model, [last], {"input_ids": IDS})[1][last]
    torch.testing.assert_close(values[Tap(last)], own)
    assert torch.allclose(values[Tap(last)], hidden) is (name == "bert")  # causal models norm it first


def test_g_13_a_shared_module_is_recorded_at_its_last_run() -> None:
    model = ARCHITECTURES["albert"].build(0).eval()
    shared = ARCHITECTURES["albert"].pattern.replace("\\", "")
    outputs: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    layer = dict(model.named_modules())[shared]
    layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    trace = Trace()
    for _ in range(2):  # found out in the first forward, used in the second
        outputs.clear(), inputs.clear()
        values, _, _ = run(model, [Tap(shared, "output", 0), Tap(shared, "input")], trace)
        assert len(outputs) == 3 and trace.calls == {shared: 3}
        assert torch.equal(values[Tap(shared, "output", 0)], outputs[-1])
        assert torch.equal(values[Tap(shared, "input")], inputs[-1])
        assert not torch.equal(outputs[-1], outputs[-2])


def test_several_selectors_of_one_module() -> None:
    class Two(nn.Module):
        def forward(self, x):
            return x + 1, x + 2

    model = nn.Sequential(Two())
    first, second = Tap("0", "output", 0), Tap("0", "output", 1)
    capture = Capture(model, [first, second], Trace())
    capture.run(lambda: model(torch.zeros(2)), may_stop=True)
    assert capture.values[first].tolist() == [1, 1] and capture.values[second].tolist() == [2, 2]


def test_the_input_may_be_a_keyword() -> None:
    class Block(nn.Module):
        def forward(self, mask=None, hidden_states=None):
            return hidden_states * 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(mask=torch.ones(2), hidden_states=x)

    model = Model()
    capture = Capture(model, [Tap("block", "input")], Trace(), {"block": lambda hidden: hidden + 1})
    output, kept = capture.run(lambda: model(torch.full((2,), 3.0)), may_stop=False)
    assert output.tolist() == [8, 8]  # the hidden states were replaced, the mask was not
    assert capture.values[Tap("block", "input")].tolist() == [4, 4]
    [handle.remove() for handle in kept]
    assert model(torch.full((2,), 3.0)).tolist() == [6, 6]


def test_a_block_without_a_tensor_cannot_be_given_the_teachers() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Module()
            self.block.forward = lambda number: torch.full((2,), number)

        def forward(self, x):
            return self.block(3.0)

    model = Model()
    with pytest.raises(AlignmentError, match="'block' is called without a tensor"):
        Capture(model, [Tap("block", "input")], Trace()).run(lambda: model(IDS), may_stop=True)
    assert hooks(model) == 0


# --- stopping --------------------------------------------------------------------------------------------------------


def test_the_forward_ends_after_the_last_tapped_module() -> None:
    model = tiny()
    trace, taps = Trace(), [Tap("model.layers.0"), Tap("model.layers.1")]
    calls = ran(model)
    _, whole, _ = run(model, taps, trace)
    assert whole is not None and "lm_head" in calls  # the first forward finds out where to stop
    assert trace == Trace({"model.layers.0": 1, "model.layers.1": 1}, "model.layers.2", learned=True)
    calls.clear()
    values, output, _ = run(model, taps, trace)
    assert output is None
    assert calls[-1] == "model.layers.1" and not [name for name in calls if name.startswith("model.layers.2")]
    assert calls.count("model.layers.1") == 1
    wanted = features(model, ["model.layers.1"], {"input_ids": IDS})[1]["model.layers.1"]
    assert torch.equal(values[Tap("model.layers.1")], wanted)


def test_the_forward_does_not_end_while_the_output_is_needed() -> None:
    model, trace = tiny(), Trace()
    for taps, stop in (([Tap("model.layers.0")], False), ([Tap("model.layers.0"), Tap("", "output", "logits")], True)):
        run(model, taps, trace, stop)
        calls = ran(model)
        _, output, _ = run(model, taps, trace, stop)
        assert output is not None and "lm_head" in calls


def test_the_forward_ends_inside_a_layer_where_that_is_possible() -> None:
    model, trace = tiny(), Trace()
    taps = [Tap("model.layers.1.self_attn", "output", 0)]
    run(model, taps, trace)
    assert trace.stop_before == "model.layers.1.post_attention_layernorm"
    calls = ran(model)
    run(model, taps, trace)
    assert calls[-1] == "model.layers.1.self_attn"
    # The stop must not fly through a layer whose forward is recomputed in the backward.
    model.train().activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    calls.clear()
    values, _, _ = run(model, taps, trace)
    assert "model.layers.1.mlp" in calls
    values[taps[0]].sum().backward()
    assert model.model.layers[1].self_attn.q_proj.weight.grad is not None


def test_the_forward_ends_at_the_last_run_of_a_shared_module() -> None:
    model, trace = ARCHITECTURES["albert"].build(0), Trace()
    shared = ARCHITECTURES["albert"].pattern.replace("\\", "")
    taps = [Tap(shared, "output", 0)]
    run(model, taps, trace)
    calls = ran(model)
    _, output, _ = run(model, taps, trace)
    assert calls.count(shared) == 3 and output is None and "predictions" not in calls


def test_nothing_is_cut_when_the_last_module_is_tapped() -> None:
    model, trace = tiny(), Trace()
    run(model, [Tap("lm_head")], trace)
    assert trace.stop_before is None
    values, output, _ = run(model, [Tap("lm_head")], trace)
    assert torch.equal(values[Tap("lm_head")], output.logits)


# --- failures and leftovers ------------------------------------------------------------------------------------------


def test_i_14_a_module_that_does_not_run_is_named() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    model = Model()
    with pytest.raises(TrainingError, match="'idle' of Model did not run in this forward"):
        Capture(model, [Tap("used"), Tap("idle")], Trace()).run(lambda: model(torch.zeros(1, 4)), may_stop=True)
    assert hooks(model) == 0


def test_unknown_modules_are_refused_without_a_hook_left() -> None:
    model = tiny()
    for taps, substitute in (([Tap("model.layers.0"), Tap("nowhere")], {}), ([], {"model.layers.0": id, "x": id})):
        with pytest.raises(AlignmentError):
            Capture(model, taps, Trace(), substitute).run(lambda: model(input_ids=IDS), may_stop=True)
        assert hooks(model) == 0


def test_c_05_no_hook_stays_after_a_forward() -> None:
    model, trace = tiny(), Trace()
    mine = model.model.layers[1].register_forward_hook(lambda *_: None)
    taps = [Tap("model.layers.1"), Tap("model.layers.1", "input")]
    for _ in range(2):
        run(model, taps, trace)
        assert hooks(model) == 1
    _, _, kept = run(model, taps, trace, substitute={"model.layers.1": lambda hidden: hidden * 0})
    assert hooks(model) == 2 and len(kept) == 1  # for recomputation in the backward
    kept[0].remove()
    assert hooks(model) == 1 and mine.id in model.model.layers[1]._forward_hooks


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_c_05_no_hook_stays_after_a_failed_forward(error: type[BaseException]) -> None:
    model = tiny()

    def fail(module, args):
        raise error("by the user's hook")

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(error, match="by the user's hook"):
        run(model, [Tap("model.layers.2")], substitute={"model.layers.0": lambda hidden: hidden})
    handle.remove()
    assert hooks(model) == 0


def test_g_08_recorded_tensors_live_as_long_as_the_capture() -> None:
    model, trace = tiny(), Trace()
    taps = [Tap("model.layers.0"), Tap("model.layers.1", "input")]
    run(model, taps, trace)
    gc.collect()
    gc.disable()
    try:
        values, _, _ = run(model, taps, trace)
        alive = [weakref.ref(value) for value in values.values()]
        assert all(reference() is not None for reference in alive)
        del values
        assert all(reference() is None for reference in alive)
    finally:
        gc.enable()


def test_a_substitution_cuts_the_gradient_where_it_detaches() -> None:
    model = tiny()
    source = torch.randn(2, 6, 16)
    values, _, kept = run(
        model, [Tap("model.layers.1")], substitute={"model.layers.1": lambda hidden: source.to(hidden.dtype)}
    )
    values[Tap("model.layers.1")].sum().backward()
    [handle.remove() for handle in kept]
    moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert moved and all(name.startswith("model.layers.1.") for name in moved)


# --- changed in place ------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """As in a ResNet: what the inner layer gives out, and what the outer one takes in, is changed afterwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        added = hidden.add_(x)
        return self.outer(added.relu_()).add_(1)


def test_what_is_changed_in_place_afterwards_is_copied() -> None:
    model, x, trace = InPlace(), torch.randn(3, 4), Trace()
    taps = [Tap("inner"), Tap("outer"), Tap("outer", "input")]
    with torch.no_grad():
        Capture(model, taps, trace).run(lambda: model(x), may_stop=False)
        assert trace.changed == {Tap("inner"), Tap("outer")}
        told: dict[Tap, torch.Tensor] = {}
        capture = Capture(model, taps, trace, on_value=lambda tap, value: told.update({tap: value}))
        capture.run(lambda: model(x), may_stop=False)
        wanted = model.inner(x)
        torch.testing.assert_close(capture.values[taps[0]], wanted)
        torch.testing.assert_close(capture.values[taps[2]], (wanted + x).relu())
        torch.testing.assert_close(capture.values[taps[1]], model.outer((wanted + x).relu()))
        assert all(told[tap] is capture.values[tap] for tap in taps)
