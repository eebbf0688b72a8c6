"""Where the parts of a pipelined teacher go."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silverspoon_kd.teacher.world.pipeline import cut_evenly, pipeline_map
from support.tiny import qwen3


def sums(sizes, numbers, num_runs):
    return [sum(size for size, number in zip(sizes, numbers, strict=True) if number == run) for run in range(num_runs)]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_the_fullest_run_is_as_small_as_can_be_and_none_is_empty(sizes, num_runs):
    numbers = cut_evenly(sizes, num_runs)
    assert numbers == sorted(numbers) and numbers[0] == 0 and max(numbers) < num_runs
    if len(sizes) < num_runs:
        return
    assert set(numbers) == set(range(num_runs))
    best = min(
        max(sum(sizes[a:b]) for a, b in zip((0, *cuts), (*cuts, len(sizes)), strict=True))
        for cuts in combinations(range(1, len(sizes)), num_runs - 1)
    )
    assert max(sums(sizes, numbers, num_runs)) == best


def test_every_device_gets_a_share_though_the_vocabulary_is_large():
    with torch.device("meta"):
        model = qwen3(layers=6, vocab=2048, tie_word_embeddings=True)
    found = pipeline_map(model, ["sim:0", "sim:1", "sim:2", "sim:3"])
    assert set(found.values()) == {"sim:0", "sim:1", "sim:2", "sim:3"}
    assert found["lm_head"] == found["model.embed_tokens"] == "sim:0"


def test_b_03_blocks_of_a_model_that_names_none():
    from transformers import BertConfig, BertForMaskedLM, BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        models = [
            GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=64)),
            BertForMaskedLM(BertConfig(num_hidden_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=64)),
            BloomForCausalLM(BloomConfig(n_layer=4, hidden_size=16, n_head=2, vocab_size=64)),
        ]
    for model in models:
        type(model)._no_split_modules = None
        found = pipeline_map(model, ["sim:0", "sim:1"])
        blocks = [name for name, child in model.named_modules() if name.split(".")[-1].isdigit()]
        assert len(blocks) == 4 and all(name in found for name in blocks)
        for name, _ in [*model.named_parameters(), *model.named_buffers()]:
            assert any(name == key or name.startswith(key + ".") for key in found), name


@pytest.mark.parametrize("num_devices", [1, 2, 3, 7])
def test_more_devices_than_parts_and_fewer(num_devices):
    with torch.device("meta"):
        model = qwen3(layers=2)
    found = pipeline_map(model, [f"sim:{number}" for number in range(num_devices)])
    order = list(dict.fromkeys(found.values()))
    assert order == [f"sim:{number}" for number in range(len(order))]
