import itertools

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from silverspoon_kd import reconfig_model
from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.model_tools.reconfig import kept_layers
from support.more_models import gpt2, resnet
from support.tiny import llama, qwen3

IDS = torch.arange(8)[None] + 1


def test_fewer_layers_saved_and_returned_alike(tmp_path):
    teacher = qwen3(layers=4)
    student = reconfig_model(teacher, tmp_path / "student", {"num_hidden_layers": 2})
    assert len(student.model.layers) == student.config.num_hidden_layers == 2
    assert len(teacher.model.layers) == teacher.config.num_hidden_layers == 4
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "student", attn_implementation="eager")
    assert torch.equal(loaded(IDS).logits, student.eval()(IDS).logits)
    assert student.name_or_path == str(tmp_path / "student")
    assert student.config._attn_implementation == "eager"


def test_without_copying_nothing_is_copied(tmp_path):
    teacher = llama()
    student = reconfig_model(teacher, tmp_path, {})
    assert not torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    assert all(parameter.requires_grad for parameter in student.parameters())


def test_copying_takes_what_has_the_same_name_and_shape(tmp_path):
    teacher = llama(layers=3)
    student = reconfig_model(
        teacher, tmp_path, {"num_hidden_layers": 2, "intermediate_size": 48}, True, freeze_copied_weights=True
    )
    source, seen = teacher.state_dict(), set()
    for name, parameter in student.named_parameters():
        fits = source[name].shape == parameter.shape
        assert torch.equal(source[name], parameter) if fits else "mlp" in name
        assert parameter.requires_grad is not fits
        seen.add(fits)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, [0, 1, 2]),
        ("first", [0, 1, 2]),
        ("last", [6, 7, 8]),
        ("even", [0, 4, 8]),
        ([8, 0, 4], [8, 0, 4]),
    ],
)
def test_chosen_layers_are_copied_in_order(tmp_path, layers, expected):
    teacher = qwen3(layers=9)
    student = reconfig_model(teacher, tmp_path, {"num_hidden_layers": 3}, copy_matching_weights=True, layers=layers)
    for layer, index in zip(student.model.layers, expected, strict=True):
        source = teacher.model.layers[index].state_dict()
        assert all(torch.equal(tensor, source[name]) for name, tensor in layer.state_dict().items())
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    # The copied student computes what the teacher does with only those layers.
    teacher.model.layers = nn.ModuleList(teacher.model.layers[index] for index in expected)
    for position, layer in enumerate(teacher.model.layers):
        layer.self_attn.layer_idx = position
    teacher.config.num_hidden_layers = 3
    torch.testing.assert_close(student(IDS).logits, teacher(IDS).logits)


@pytest.mark.parametrize("depth", range(2, 34))
def test_even_layers_reach_from_the_first_to_the_last_with_equal_gaps(depth):
    for wanted in range(2, depth + 1):
        kept = kept_layers(depth, wanted, "even")
        gaps = {after - before for before, after in itertools.pairwise(kept)}
        assert (len(kept), kept[0], kept[-1]) == (wanted, 0, depth - 1)
        assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1


def test_thirty_layers_to_ten_with_their_kinds(tmp_path):
    kinds = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(30)]
    teacher = qwen3(layers=30, hidden=8, layer_types=kinds, sliding_window=4, use_sliding_window=True)
    student = reconfig_model(teacher, tmp_path, {"num_hidden_layers": 10}, True, layers="even")
    chosen = [0, 3, 6, 10, 13, 16, 19, 23, 26, 29]
    assert student.config.layer_types == [kinds[index] for index in chosen]
    assert AutoConfig.from_pretrained(tmp_path).layer_types == student.config.layer_types
    for layer, index in zip(student.model.layers, chosen, strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, teacher.model.layers[index].mlp.up_proj.weight)
    student(IDS)


def test_own_names_of_a_config_and_standard_names_mean_the_same(tmp_path):
    teacher = gpt2(n_layer=4)
    one = reconfig_model(teacher, tmp_path / "a", {"n_layer": 2}, True, layers="last")
    other = reconfig_model(teacher, tmp_path / "b", {"num_hidden_layers": 2}, True, layers="last")
    assert torch.equal(one(IDS).logits, other(IDS).logits)
    assert torch.equal(one.transformer.h[0].mlp.c_fc.weight, teacher.transformer.h[2].mlp.c_fc.weight)


def test_token_ids_are_no_layers(tmp_path):
    teacher = llama(layers=2, eos_token_id=[1, 2])
    assert reconfig_model(teacher, tmp_path, {"num_hidden_layers": 1}).config.eos_token_id == [1, 2]


def test_deeper_student_repeats_layers(tmp_path):
    teacher = llama(layers=2)
    student = reconfig_model(teacher, tmp_path, {"num_hidden_layers": 3}, True, layers=[0, 1, 1])
    weights = [layer.mlp.up_proj.weight for layer in student.model.layers]
    assert torch.equal(weights[1], weights[2])
    assert torch.equal(weights[0], teacher.model.layers[0].mlp.up_proj.weight)


def test_vision_model_with_other_widths(tmp_path):
    teacher = resnet()
    student = reconfig_model(teacher, tmp_path, {"hidden_sizes": [8, 12]}, copy_matching_weights=True)
    student.eval()(torch.randn(1, 3, 32, 32))
    source = teacher.state_dict()
    assert any(torch.equal(p, source[n]) for n, p in student.named_parameters() if "stages.0" in n)
    assert reconfig_model(teacher, tmp_path, {"num_labels": 7}).classifier[1].out_features == 7


def test_dtype_mode_and_generation_settings_are_kept(tmp_path):
    teacher = llama().to(torch.bfloat16).eval()
    teacher.generation_config.max_new_tokens = 17
    student = reconfig_model(teacher, tmp_path, {"num_hidden_layers": 1}, True)
    assert student.dtype == torch.bfloat16
    assert not student.training
    assert student.generation_config.max_new_tokens == 17


def test_tied_weights_stay_tied_and_freeze_once(tmp_path):
    student = reconfig_model(llama(tie_word_embeddings=True), tmp_path, {"num_hidden_layers": 1}, True, True)
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert not student.lm_head.weight.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"diff": {"num_hiden_layers": 2}}, "Did you mean 'num_hidden_layers'"),
        ({"diff": {"num_attention_heads": 3}}, r"not a multiple of the number of attention heads \(3\)"),
        ({"diff": {}, "freeze_copied_weights": True}, "copies nothing"),
        ({"diff": {"num_hidden_layers": 2}, "layers": "middle"}, "'middle' is unknown"),
        ({"diff": {"num_hidden_layers": 2}, "layers": [0]}, "one index for each new layer"),
        ({"diff": {"num_hidden_layers": 2}, "layers": [0, 9]}, "layers 0 to 3"),
        ({"diff": {"num_hidden_layers": 9}, "layers": "even"}, "cannot choose 9 of 4 layers"),
        ({"diff": {"num_hidden_layers": "two"}}, "refuses the changed fields|cannot be built"),
    ],
)
def test_wishes_that_cannot_be_are_refused(tmp_path, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        reconfig_model(llama(), tmp_path / "x", **arguments)
    assert not (tmp_path / "x").exists()


def test_modules_without_a_config_and_files_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="Sequential is no transformers model"):
        reconfig_model(nn.Sequential(), tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="must be a folder"):
        reconfig_model(llama(), tmp_path / "file")
    with pytest.raises(ConfigurationError, match="no number of layers"):
        reconfig_model(resnet(), tmp_path, layers="even")
