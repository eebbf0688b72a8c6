"""Bytes that are worked out from shapes are those that can be counted by hand."""

import pytest
import torch
from torch import Tensor, nn

from silverspoon_kd.capture import Capture, Tap, Trace, wrap_units
from silverspoon_kd.teacher.memory import LiveBytes, bytes_of, forward_bytes, sharded_bytes, weight_bytes
from support.architectures import mixtral
from support.tiny import qwen3

FLOAT = 4


class Two(nn.Module):
    """8 -> 100 -> 8, with what is in between kept no longer than needed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 100), nn.Linear(100, 8)
        self.second.register_buffer("table", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x)


def traced(model: nn.Module, taps: list[Tap], **inputs: Tensor) -> Trace:
    trace = Trace()
    with torch.no_grad():
        Capture(model, taps, trace).run(lambda: model(**inputs), may_stop=False)
    return trace


def test_live_bytes_count_each_storage_once_while_it_lives():
    live, before = LiveBytes(), torch.ones(1000)
    with live:
        a = before + 1
        view = a[10:]
        a += before
        b = view * 2  # 990 numbers
        del a, view
        b.add_(before[10:])
        c = b + 1
        del b, c
    assert live.peak == {"cpu": (1000 + 990) * FLOAT}


@pytest.mark.parametrize("rows", [1, 7])
def test_a_forward_on_two_devices_by_hand(rows):
    model = Two().requires_grad_(False)
    x = torch.zeros(1, 8)
    taps = [Tap("first"), Tap("")]
    trace = traced(model, taps, x=x)
    before = {name: id(module.forward) for name, module in model.named_modules() if "forward" in vars(module)}
    places = {"first": "cuda:0", "second": "cuda:1"}
    assert weight_bytes(model, places) == {"cuda:0": 900 * FLOAT, "cuda:1": (808 + 5) * FLOAT}
    found = forward_bytes(model, taps, trace, {"x": x}, rows, places, None)
    # The inputs and what the first gives; a copy of that and the outputs, which stay there.
    assert found.peak == {"cuda:0": (8 + 100) * FLOAT * rows, "cuda:1": (100 + 8) * FLOAT * rows}
    assert found.signals == {"cuda:0": 100 * FLOAT * rows, "cuda:1": 8 * FLOAT * rows}
    assert before == {name: id(module.forward) for name, module in model.named_modules() if "forward" in vars(module)}
    assert model(x).device.type == "cpu"


def test_what_stops_early_needs_less():
    model = qwen3(0).requires_grad_(False)
    batch = {"input_ids": torch.ones(1, 12, dtype=torch.long), "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    found = []
    for taps in ([Tap("model.layers.0")], [Tap("model.layers.0"), Tap("lm_head")]):
        trace = traced(model, taps, **batch)
        found.append(forward_bytes(model, taps, trace, batch, 2, {"": "cpu"}, None))
    assert found[0].signals == {"cpu": 2 * 12 * 32 * FLOAT}
    assert found[1].signals == {"cpu": 2 * 12 * (32 + 64) * FLOAT}
    assert found[0].peak["cpu"] < found[1].peak["cpu"]


def test_a_forward_that_depends_on_values_is_not_known():
    model = mixtral(0, experts_implementation="grouped_mm").requires_grad_(False)
    ids = torch.ones(1, 12, dtype=torch.long)
    taps = [Tap("model.layers.0")]
    assert forward_bytes(model, taps, traced(model, taps, input_ids=ids), {"input_ids": ids}, 2, None, None) is None


def test_tied_weights_count_once():
    apart, tied = qwen3(0), qwen3(0, tie_word_embeddings=True)
    assert weight_bytes(apart)["cpu"] - weight_bytes(tied)["cpu"] == 64 * 32 * FLOAT
    assert weight_bytes(tied) == {
        "cpu": sum(each.numel() * FLOAT for each in [*tied.parameters(), *tied.buffers()]),
    }
    assert bytes_of(torch.zeros(3, 5, dtype=torch.bfloat16)) == 30


def test_shares_are_those_of_the_largest_and_a_block_is_gathered():
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 10), nn.Linear(10, 3, bias=False))
    units = [model[0], model[1]]
    # 7 rows on 2 ranks are 4 each.
    first, second, rest = (4 * 4 + 4) * FLOAT, (5 * 7 + 5) * FLOAT, 2 * 10 * FLOAT
    held, gathered = sharded_bytes(model, units, 2)
    assert held == first + second + rest
    assert gathered == 2 * rest + 2 * 2 * second
    assert sharded_bytes(model, [], 2) == (held, 2 * 2 * held)
    layers = qwen3(0)
    assert sharded_bytes(layers, wrap_units(layers, None), 1)[0] == weight_bytes(layers)["cpu"]
