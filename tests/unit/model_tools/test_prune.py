import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from silverspoon_kd import prune_model
from silverspoon_kd.errors import ConfigurationError, MissingDependencyError
from support.more_models import bert, gpt2, resnet
from support.tiny import llama, qwen3

pytest.importorskip("torch_pruning")

IDS = torch.arange(8)[None] + 1


def _states(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def _silence_mlp(layer, channels) -> None:
    """Channels that add nothing to the output and are the smallest."""
    layer.mlp.gate_proj.weight[channels] = 0
    layer.mlp.up_proj.weight[channels] = 0
    layer.mlp.down_proj.weight[:, channels] = 0


@torch.no_grad()
def _silence_head(attention, head, size=8) -> None:
    rows = slice(head * size, (head + 1) * size)
    attention.q_proj.weight[rows] = 0
    attention.o_proj.weight[:, rows] = 0


@pytest.mark.parametrize("build", [llama, qwen3])
def test_channels_without_effect_go_first_and_the_output_stays(tmp_path, build):
    model = build(layers=2).eval()
    for shift, layer in enumerate(model.model.layers):
        _silence_mlp(layer, [shift, 7, 20, 33, *range(40, 60)])
    before, expected = _states(model), model(IDS).logits
    pruned = prune_model(model, tmp_path, {"intermediate_size": 40})
    assert pruned.model.layers[1].mlp.up_proj.weight.shape == (40, 32)
    torch.testing.assert_close(pruned(IDS).logits, expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(loaded(IDS).logits, expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("build", [llama, qwen3])
def test_query_heads_without_effect_go_first(tmp_path, build):
    model = build(layers=2).eval()
    for head, layer in zip([(0, 3), (1, 2)], model.model.layers, strict=True):
        for index in head:
            _silence_head(layer.self_attn, index)
    expected = model(IDS).logits
    pruned = prune_model(model, tmp_path, {"num_attention_heads": 2})
    assert pruned.model.layers[0].self_attn.q_proj.weight.shape == (16, 32)
    assert pruned.model.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    torch.testing.assert_close(pruned(IDS).logits, expected)


def test_key_value_heads_take_their_query_heads_along(tmp_path):
    model = llama(layers=1).eval()
    attention = model.model.layers[0].self_attn
    for head in (0, 1):
        _silence_head(attention, head)
    with torch.no_grad():
        attention.k_proj.weight[:8] = 0
        attention.v_proj.weight[:8] = 0
    expected = model(IDS).logits
    pruned = prune_model(model, tmp_path, {"num_attention_heads": 2, "num_key_value_heads": 1})
    assert torch.equal(pruned.model.layers[0].self_attn.v_proj.weight, attention.v_proj.weight[8:])
    torch.testing.assert_close(pruned(IDS).logits, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_size_is_the_same_slice_everywhere(tmp_path, tied):
    model = llama(layers=2, tie_word_embeddings=tied, attn_implementation="sdpa")
    keep = [0, 3, 4, 5, 8, 9, 15, 16, 17, 20, 21, 22, 25, 28, 30, 31]
    drop = [index for index in range(32) if index not in keep]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            axis = 0 if name.endswith(("o_proj.weight", "down_proj.weight")) or parameter.dim() == 1 else 1
            parameter.index_copy_(axis, torch.tensor(drop), parameter.index_select(axis, torch.tensor(drop)) * 1e-3)
    pruned = prune_model(model, tmp_path, {"hidden_size": 16})
    source = model.state_dict()
    for name, tensor in pruned.state_dict().items():
        axis = 0 if name.endswith(("o_proj.weight", "down_proj.weight")) or tensor.dim() == 1 else 1
        assert torch.equal(tensor, source[name].index_select(axis, torch.tensor(keep))), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(IDS).logits, pruned.eval()(IDS).logits)


def test_all_widths_at_once_train_and_generate(tmp_path):
    diff = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    pruned = prune_model(qwen3(layers=3), tmp_path, diff)
    pruned(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in pruned.parameters())
    assert pruned.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 10)
    assert pruned.config.head_dim == 8


def test_gpt2_mlp_channels(tmp_path):
    model = gpt2().eval()
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_fc.weight[:, ::3] = 0
            block.mlp.c_fc.bias[::3] = 0
            block.mlp.c_proj.weight[::3] = 0
    expected = model(IDS).logits
    pruned = prune_model(model, tmp_path, {"n_inner": 32})
    assert pruned.transformer.h[0].mlp.c_fc.weight.shape == (16, 32)
    torch.testing.assert_close(pruned(IDS).logits, expected)


def test_resnet_channels_across_shortcuts(tmp_path):
    model = resnet().eval()
    silent = [1, 2, 6, 7]
    with torch.no_grad():
        for name, module in model.resnet.encoder.stages[1].named_modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight[silent] = module.bias[silent] = 0
            if isinstance(module, nn.Conv2d):
                module.weight[silent] = 0
                if module.in_channels == 16:
                    module.weight[:, silent] = 0
            assert name is not None
        model.classifier[1].weight[:, silent] = 0
    image = torch.randn(2, 3, 32, 32)
    expected = model(image).logits
    pruned = prune_model(model, tmp_path, {"hidden_sizes": [8, 12]})
    torch.testing.assert_close(pruned(image).logits, expected)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(image).logits, expected)
    narrow = prune_model(model, tmp_path, {"hidden_sizes": [4, 12], "embedding_size": 4})
    assert narrow(image).logits.shape == (2, 3)


def test_encoder_heads_become_narrower_evenly(tmp_path):
    model = bert(hidden_size=32, num_attention_heads=4)
    pruned = prune_model(model, tmp_path, {"hidden_size": 16})
    pruned(IDS)
    old, new = model.encoder.layer[0].attention, pruned.encoder.layer[0].attention
    # Rows of the new projections, found again among the old biases: four of every head, the same for queries and keys.
    rows = {}
    with torch.no_grad():
        for module in (old.self.query, old.self.key, old.self.value):
            module.bias.copy_(torch.arange(32.0))
    again = prune_model(model, tmp_path, {"hidden_size": 16}).encoder.layer[0].attention
    for name in ("query", "key", "value"):
        rows[name] = getattr(again.self, name).bias.long().tolist()
        assert [row // 8 for row in rows[name]] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert rows["query"] == rows["key"]
    assert new.self.query.weight.shape == (16, 16)


def _cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
        nn.ReLU(),
        nn.Linear(10, 2),
    ).eval()


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_plain_modules_by_layer_name(tmp_path):
    model = _cnn()
    with torch.no_grad():
        model[5].weight[[1, 4, 6, 9]] = 0
        model[5].bias[[1, 4, 6, 9]] = 0
        model[7].weight[:, [1, 4, 6, 9]] = 0
    expected = model(IMAGE)
    pruned = prune_model(model, tmp_path, {"5": 6}, IMAGE)
    assert pruned[5].weight.shape == (6, 128)
    torch.testing.assert_close(pruned(IMAGE), expected)
    assert model[5].out_features == 10
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["5.weight"], pruned[5].weight)


def test_channels_before_a_flatten_and_in_groups(tmp_path):
    model = _cnn()
    with torch.no_grad():
        for channel in (1, 2, 5, 6):  # two of each group of four
            model[3].weight[channel] = 0
            model[3].bias[channel] = 0
            model[5].weight[:, channel * 16 : (channel + 1) * 16] = 0
    expected = model(IMAGE)
    pruned = prune_model(model, tmp_path, {"3": 4}, (IMAGE,))
    assert pruned[5].in_features == 64
    torch.testing.assert_close(pruned(IMAGE), expected)


def test_options_of_torch_pruning(tmp_path):
    model = _cnn()
    assert prune_model(model, tmp_path, {"5": 5}, IMAGE, round_to=4)[5].out_features == 8
    assert prune_model(model, tmp_path, {"5": 9}, IMAGE, round_to=4)[5].out_features == 10
    calls = []

    def forward(module, inputs):
        calls.append(inputs)
        return {"wanted": module(inputs["image"])}

    inputs = {"image": IMAGE}
    pruned = prune_model(
        model, tmp_path, {"5": 4}, inputs, forward_fn=forward, output_transform=lambda out: out["wanted"]
    )
    assert pruned[5].out_features == 4
    assert calls == [inputs]
    with pytest.raises(ConfigurationError, match="^5 .*kept whole"):
        prune_model(model, tmp_path, {"5": 4}, IMAGE, ignored_layers=[model[5]])
    with torch.no_grad():
        model[5].bias.copy_(torch.arange(10.0))
        model[5].weight.zero_()
    rows = prune_model(model, tmp_path, {"5": 4}, IMAGE, out_channel_groups={"5": 2})[5].bias.tolist()
    assert [row // 5 for row in rows] == [0, 0, 1, 1]
    with pytest.raises(ConfigurationError, match="multiple of 2"):
        prune_model(model, tmp_path, {"5": 5}, IMAGE, num_heads={model[5]: 2})


def test_flags_and_freezing(tmp_path):
    model = llama(layers=1)
    model.lm_head.weight.requires_grad_(False)
    pruned = prune_model(model, tmp_path, {"intermediate_size": 32})
    assert {n for n, p in pruned.named_parameters() if not p.requires_grad} == {"lm_head.weight"}
    frozen = prune_model(model, tmp_path, {"intermediate_size": 32}, freeze_copied_weights=True)
    assert {n.split(".")[3] for n, p in frozen.named_parameters() if p.requires_grad} == {"mlp"}
    assert all(p.requires_grad for p in model.model.parameters())
    assert model.training


@pytest.mark.parametrize(
    ("build", "diff", "message"),
    [
        (llama, None, "without diff"),
        (llama, {"intermediate_sise": 3}, "Did you mean 'intermediate_size'"),
        (llama, {"num_hidden_layers": 2}, "Use reconfig_model"),
        (llama, {"intermediate_size": 100}, "only removes"),
        (llama, {"vocab_size": 40}, "cannot be pruned to"),
        (llama, {"head_dim": 4}, "heads are only removed whole"),
        (llama, {"num_attention_heads": 4, "num_key_value_heads": 1}, "key-value head keeps"),
        (llama, {"attention_dropout": 0.1}, "removes no channel"),
        (gpt2, {"n_head": 1}, "heads are only removed whole"),
        (gpt2, {"n_embd": 8}, "heads are only removed whole"),
        (gpt2, {"n_embd": 8, "n_head": 1}, "is not known here"),
        (bert, {"hidden_size": 16, "num_attention_heads": 2}, "can only become narrower"),
        (_cnn, {"55": 3}, "Did you mean '5'"),
        (_cnn, {"5": 0}, "from 1 to 10"),
        (_cnn, {"5": 3}, "cannot guess its inputs"),
    ],
)
def test_wishes_that_pruning_cannot_fulfil_are_refused(tmp_path, build, diff, message):
    with pytest.raises(ConfigurationError, match=message):
        prune_model(build(), tmp_path / "x", diff)
    assert not (tmp_path / "x").exists()


def test_other_refusals(tmp_path):
    with pytest.raises(ConfigurationError, match="next multiple is 40"):
        prune_model(llama(), tmp_path, {"intermediate_size": 36}, round_to=8)
    with pytest.raises(ConfigurationError, match="cannot trace"):
        prune_model(_cnn(), tmp_path, {"5": 3}, torch.randn(1, 3, 4, 4))
    with pytest.raises(ConfigurationError, match="has no module 'attn'"):
        prune_model(_cnn(), tmp_path, {"5": 3}, IMAGE, num_heads={"attn": 2})
    with pytest.raises(ConfigurationError, match="this Linear"):
        prune_model(_cnn(), tmp_path, {"5": 3}, IMAGE, ignored_layers=[nn.Linear(2, 2)])


def test_different_widths_for_added_layers_are_refused(tmp_path):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 6), nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.c(self.a(x) + self.b(x))

    with pytest.raises(ConfigurationError, match="Different widths"):
        prune_model(Sum(), tmp_path, {"a": 3, "b": 4}, torch.randn(2, 3))
    pruned = prune_model(Sum(), tmp_path, {"a": 3}, torch.randn(2, 3))
    assert (pruned.b.out_features, pruned.c.in_features) == (3, 3)


def test_missing_torch_pruning_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(MissingDependencyError, match=r"silverspoon-kd\[prune\]"):
        prune_model(llama(), tmp_path, {"intermediate_size": 8})
