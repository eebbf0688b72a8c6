"""Which modules of a frozen teacher are gathered as units."""

import pytest
from torch import nn

from silverspoon_kd.capture import wrap_units
from silverspoon_kd.errors import PlacementError
from silverspoon_kd.teacher.sharding import shard_frozen
from support.tiny import llama, qwen3


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x)


class Stack(nn.Module):
    """A model that names no blocks; its head is tied to its embedding."""

    def __init__(self, blocks=4, width=8, vocab=100):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_e_02_missing_no_split_modules_falls_back_to_size():
    model = Stack()
    assert wrap_units(model, None) == []
    assert wrap_units(model, None, size_threshold=100) == list(reversed(model.blocks))
    for declared in (None, [], set(), ("Gone",)):
        model._no_split_modules = declared
        assert wrap_units(model, None, size_threshold=100) == list(reversed(model.blocks))
    model._no_split_modules = {"Block", "Gone"}
    assert wrap_units(model, None) == list(reversed(model.blocks))


def test_e_02_declared_blocks_of_transformers_models():
    for model in (qwen3(), llama()):
        assert wrap_units(model, None) == list(reversed(model.model.layers))


def test_e_04_wrap_cls_as_string_list_and_unknown_name():
    model = Stack()
    assert wrap_units(model, "Block") == list(reversed(model.blocks))
    assert wrap_units(model, ["Block", "Layer"]) == list(reversed(model.blocks))
    assert wrap_units(model, []) == []
    with pytest.raises(PlacementError, match=r"wrap_cls='Blok'.*Did you mean 'Block'.*Embedding"):
        wrap_units(model, "Blok")


def test_e_05_tied_weights_stay_with_the_root():
    model = Stack()
    assert model.embedding not in wrap_units(model, None, size_threshold=1000)
    assert wrap_units(model, ["Embedding", "Block", "Linear"])[-1] is model.blocks[0]
    assert model.head not in wrap_units(model, ["Linear"])


def test_nested_units_come_inside_out():
    model = Stack(blocks=1)
    assert wrap_units(model, ["Block", "Linear"]) == [model.blocks[0].linear, model.blocks[0]]


def test_quantised_teachers_are_refused():
    model = Stack()
    model.is_quantized = True
    with pytest.raises(PlacementError, match="quantised"):
        shard_frozen(model, mesh=None, device=None)
