"""Layers whose hidden states nobody uses, where the blocks around them get theirs from elsewhere."""

import pytest
import torch
import transformers
from torch import nn

from silverspoon_kd.capture import Capture, Tap, Trace
from silverspoon_kd.capture.skipped import find_skipped
from support.architectures import bert, t5
from support.tiny import llama, qwen3

IDS = torch.randint(1, 60, (2, 6), generator=torch.Generator().manual_seed(0))


def gpt2(seed: int, layers: int) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=layers, n_head=2, bos_token_id=1, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config)


def found_in(model: nn.Module, blocks: list[str], inputs: dict | None = None) -> list[str]:
    inputs = {"input_ids": IDS} if inputs is None else inputs
    taps = [Tap(name, selector=0) for name in blocks]
    return list(find_skipped(model, blocks, taps, Trace(), inputs))


def layers(parent: str, *indices: int) -> list[str]:
    return [f"{parent}.{index}" for index in indices]


@pytest.mark.parametrize(
    ("model", "parent"),
    [
        (lambda: qwen3(0, layers=5), "model.layers"),
        (lambda: llama(0, layers=5), "model.layers"),
        (lambda: bert(0, num_hidden_layers=5), "bert.encoder.layer"),
        (lambda: gpt2(0, layers=5), "transformer.h"),
    ],
)
def test_layers_before_and_between_the_blocks_need_not_run(model, parent: str) -> None:
    assert found_in(model(), layers(parent, 1, 3)) == layers(parent, 0, 2)
    assert found_in(model(), layers(parent, 0, 1)) == []


def test_layers_before_one_that_runs_itself_run() -> None:
    assert found_in(qwen3(0), ["model.layers.2.mlp"]) == []


def test_layers_that_hand_on_more_than_hidden_states_run() -> None:
    # T5's first layer makes the position bias of all.
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    assert found_in(t5(0, num_layers=4), layers("encoder.block", 1, 3), inputs) == []


class Stack(nn.Module):
    """Layers on hidden states."""

    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([first or nn.Linear(4, 4), *(nn.Linear(4, 4) for _ in range(3))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + other


class Shortcut(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = Last()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        return self.layers[3](self.layers[2](self.layers[1](first)), first)


def test_a_layer_that_a_block_also_uses_runs() -> None:
    inputs = {"x": torch.ones(2, 4)}
    assert found_in(Stack(), layers("layers", 1, 3), inputs) == layers("layers", 0, 2)
    assert found_in(Shortcut(), layers("layers", 3), inputs) == []


def test_a_layer_with_running_statistics_runs() -> None:
    assert found_in(Stack(nn.BatchNorm1d(4)), layers("layers", 1), {"x": torch.ones(2, 4)}) == []


def test_all_layers_run_where_the_output_is_wanted() -> None:
    model, batch, block = Stack(), torch.ones(2, 4), "layers.3"
    trace = Trace(skipped=find_skipped(model, [block], [Tap(block)], Trace(), {"x": batch}))
    assert list(trace.skipped) == layers("layers", 0, 1, 2)
    capture = Capture(model, [Tap(block)], trace, {block: lambda hidden: hidden})
    output, kept = capture.run(lambda: model(batch), may_stop=False)
    for handle in kept:
        handle.remove()
    torch.testing.assert_close(output, model(batch), rtol=0, atol=0)


def test_the_models_forward_is_as_before() -> None:
    model = qwen3(0).eval()
    wanted = model(IDS).logits
    blocks = layers("model.layers", 1, 3)
    taps = [Tap(name) for name in blocks]
    trace = Trace(skipped=find_skipped(model, blocks, taps, Trace(), {"input_ids": IDS}))
    hidden = torch.randn(2, 6, 32)
    capture = Capture(model, taps, trace, dict.fromkeys(blocks, lambda _: hidden))
    _, kept = capture.run(lambda: model(IDS), may_stop=True)
    for handle in kept:
        handle.remove()
    assert capture.values[taps[0]].requires_grad
    assert not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(model(IDS).logits, wanted, rtol=0, atol=0)
