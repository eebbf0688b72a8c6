"""Pairs of modules from patterns."""

import pytest
import torch
from torch import nn

from silverspoon_kd import create_alignments
from silverspoon_kd.alignment import Alignment, AlignmentList, layer_map
from silverspoon_kd.errors import AlignmentError, LossError, SilverSpoonError
from support.architectures import ARCHITECTURES, bert, gpt2
from support.tiny import llama, qwen3

LAYERS = r"model\.layers\.\d+"


@pytest.fixture(scope="module")
def deep() -> tuple[nn.Module, nn.Module]:
    return tuple(llama(seed, layers=12, hidden=8, vocab=50, num_attention_heads=2) for seed in (0, 1))


def students(alignments) -> list[str]:
    return [each.student_module_name for each in alignments]


def pairs(alignments) -> list[tuple[str, str]]:
    return [(each.teacher_module_name, each.student_module_name) for each in alignments]


# --- patterns --------------------------------------------------------------------------------------------------------


def test_g_01_patterns_match_whole_names(deep) -> None:
    assert students(create_alignments(*deep, r"model\.layers\.1")) == ["model.layers.1"]
    assert students(create_alignments(*deep, LAYERS)) == [f"model.layers.{index}" for index in range(12)]
    assert students(create_alignments(*deep, r"model\.layers\.(3|7)")) == ["model.layers.3", "model.layers.7"]


def test_g_01_order_is_the_models_own_however_it_is_asked_for(deep) -> None:
    wanted = ["model.layers.2", "model.layers.10", "model.layers.11", "lm_head"]
    asked = ["lm_head", r"model\.layers\.1[01]", r"model\.layers\.2"]
    assert students(create_alignments(*deep, asked)) == wanted
    maps = {"lm_head": "lm_head", r"model\.layers\.(1\d|2)": r"model.layers.\1"}
    assert students(create_alignments(*deep, maps)) == wanted


def test_g_01_two_patterns_for_one_module_make_one_pair(deep) -> None:
    assert students(create_alignments(*deep, [r"model\.layers\.1", r"model\.layers\.[01]"])) == [
        "model.layers.0",
        "model.layers.1",
    ]


def test_pairs_that_are_the_same_in_name_only_are_made_by_a_map() -> None:
    teacher, student = gpt2(0), llama(layers=2, hidden=16)
    with pytest.raises(AlignmentError, match=r"matches no module of the student LlamaForCausalLM"):
        create_alignments(teacher, student, r"transformer\.h\.\d+")
    made = create_alignments(teacher, student, {r"transformer\.h\.(\d+)": r"model.layers.\1"})
    assert pairs(made) == [("transformer.h.0", "model.layers.0"), ("transformer.h.1", "model.layers.1")]
    assert (made.teacher, made.student) == (teacher, student)


def test_what_is_given_reaches_every_alignment(deep) -> None:
    def start(module):
        nn.init.zeros_(module.weight)

    made = create_alignments(
        *deep,
        r"model\.layers\.[01]",
        "normalized_mse",
        {"eps": 0.5},
        0,
        False,
        start,
        2.5,
        loss_weight=3.0,
        learning_rate=0.1,
        weight_decay=0.2,
    )
    for each in made:
        assert each.loss.name == "normalized_mse" and each.loss.eps == 0.5
        assert (each.teacher_output_selector, each.student_output_selector) == (0, 0)
        assert (each.auto_projector, each.projector_init, each.max_grad_norm) == (False, start, 2.5)
        assert (each.loss_weight, each.learning_rate, each.weight_decay) == (3.0, 0.1, 0.2)


# --- nothing or the wrong thing matched ------------------------------------------------------------------------------


def test_g_02_nothing_matched() -> None:
    teacher, student = qwen3(0, layers=2, hidden=16), llama(1, layers=2, hidden=16)
    with pytest.raises(ValueError) as caught:
        create_alignments(teacher, student, r"transformer\.h\.\d+")
    message = str(caught.value)
    assert isinstance(caught.value, SilverSpoonError)
    assert r"'transformer\\.h\\.\\d+'" in message and "teacher Qwen3ForCausalLM" in message
    assert "'model.layers'" in message  # what it could have matched


def test_g_02_near_names_are_proposed() -> None:
    pair = ARCHITECTURES["llama"].pair()
    with pytest.raises(AlignmentError, match=r"Did you mean 'model\.layers\.0'"):
        create_alignments(*pair, r"model\.layer\.\d+")


def test_g_02_matched_in_one_model_only() -> None:
    teacher, student = qwen3(0, layers=2, hidden=16), llama(1, layers=2, hidden=16)
    with pytest.raises(AlignmentError, match="matches no module of the student LlamaForCausalLM"):
        create_alignments(teacher, student, r"model\.layers\.\d+\.self_attn\.q_norm")
    with pytest.raises(AlignmentError, match="matches no module of the teacher LlamaForCausalLM"):
        create_alignments(student, teacher, r"model\.layers\.\d+\.self_attn\.q_norm")


@pytest.mark.parametrize("pattern", ["(", "[a", "*x", r"model\.(\d"])
def test_g_02_invalid_patterns(pattern: str) -> None:
    pair = ARCHITECTURES["llama"].pair()
    with pytest.raises(AlignmentError, match="is no valid regular expression") as caught:
        create_alignments(*pair, pattern)
    assert repr(pattern) in str(caught.value)


@pytest.mark.parametrize("nothing", [[], {}])
def test_g_02_no_pattern_at_all(nothing) -> None:
    with pytest.raises(AlignmentError, match="modules is empty"):
        create_alignments(*ARCHITECTURES["llama"].pair(), nothing)


def test_g_02_one_of_several_patterns_matches_nothing(deep) -> None:
    with pytest.raises(AlignmentError, match="'nowhere' matches no module"):
        create_alignments(*deep, [LAYERS, "nowhere"])


def test_maps_that_lead_nowhere(deep) -> None:
    teacher, student = deep
    with pytest.raises(
        AlignmentError, match=r"'model\.layers\.3' maps to 'model\.layer\.3'.*Did you mean 'model\.layers"
    ):
        create_alignments(teacher, student, {r"model\.layers\.(3)": r"model.layer.\1"})
    with pytest.raises(AlignmentError, match=r"template .* does not fit the pattern"):
        create_alignments(teacher, student, {r"model\.layers\.3": r"model.layers.\1"})
    with pytest.raises(AlignmentError, match=r"Two teacher modules map to the student module 'model\.layers\.0'"):
        create_alignments(teacher, student, {r"model\.layers\.\d": "model.layers.0"})


# --- numbers of layers -----------------------------------------------------------------------------------------------


def test_g_12_different_numbers_of_layers_are_refused_with_a_map_that_works() -> None:
    teacher, student = qwen3(0, layers=4, hidden=16), qwen3(1, layers=2, hidden=16)
    with pytest.raises(AlignmentError, match="matches 4 teacher modules and 2 student modules") as caught:
        create_alignments(teacher, student, LAYERS)
    message = str(caught.value)
    proposal = eval(message[message.index("modules={") + len("modules=") : message.index("}") + 1])
    assert pairs(create_alignments(teacher, student, proposal)) == [
        ("model.layers.1", "model.layers.0"),
        ("model.layers.3", "model.layers.1"),
    ]


def test_g_12_a_deeper_student_is_refused_with_the_lonely_names() -> None:
    teacher, student = qwen3(0, layers=2, hidden=16), qwen3(1, layers=4, hidden=16)
    with pytest.raises(AlignmentError, match=r"2 teacher modules and 4 student.*model\.layers\.2, model\.layers\.3"):
        create_alignments(teacher, student, LAYERS)


def test_g_12_same_number_other_names() -> None:
    teacher, student = qwen3(0, layers=4, hidden=16), qwen3(1, layers=4, hidden=16)
    del student.model.layers[0]
    student.model.layers.extend([nn.Identity()])
    assert len(create_alignments(teacher, student, LAYERS)) == 4
    student.model.layers.add_module("extra", nn.Identity())
    with pytest.raises(AlignmentError, match=r"without counterpart: model\.layers\.extra"):
        create_alignments(teacher, student, r"model\.layers\.\w+")


@pytest.mark.parametrize(
    ("teacher", "student", "choose", "wanted"),
    [
        (4, 2, "even", {1: 0, 3: 1}),
        (12, 4, "even", {2: 0, 5: 1, 8: 2, 11: 3}),
        (30, 10, "even", {2 + 3 * index: index for index in range(10)}),
        (7, 3, "even", {1: 0, 3: 1, 6: 2}),
        (3, 3, "even", {0: 0, 1: 1, 2: 2}),
        (5, 1, "even", {4: 0}),
        (5, 2, "first", {0: 0, 1: 1}),
        (5, 2, "last", {3: 0, 4: 1}),
    ],
)
def test_layer_maps(teacher: int, student: int, choose: str, wanted: dict[int, int]) -> None:
    assert layer_map(teacher, student, choose) == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 4), "at least one layer and not more"),
        ((2, 0), "at least one layer"),
        ((4, 2, "middle"), "'middle' is unknown"),
    ],
)
def test_layer_maps_that_do_not_exist(arguments, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        layer_map(*arguments)


# --- nested ----------------------------------------------------------------------------------------------------------


def test_g_14_nested_matches_are_refused(deep) -> None:
    with pytest.raises(AlignmentError, match=r"'model\.layers\.0\.mlp' lies inside 'model\.layers\.0'"):
        create_alignments(*deep, r"model\.layers\.0(\.mlp)?")
    assert students(create_alignments(*deep, r"model\.layers\.(1|10)")) == ["model.layers.1", "model.layers.10"]


# --- losses ----------------------------------------------------------------------------------------------------------


def test_g_15_unknown_losses_are_refused_with_the_near_name(deep) -> None:
    with pytest.raises(ValueError, match=r"msee.*Did you mean 'mse'"):
        create_alignments(*deep, LAYERS, "msee")
    with pytest.raises(LossError):
        create_alignments(*deep, LAYERS, "mse", {"temperature": 2})
    with pytest.raises(LossError, match=r"cannot be called as \(student, teacher\)"):
        create_alignments(*deep, LAYERS, lambda only: only)


# --- lists -----------------------------------------------------------------------------------------------------------


def test_lists_of_several_calls_are_added_up(deep) -> None:
    layers, head = create_alignments(*deep, r"model\.layers\.[01]"), create_alignments(*deep, "lm_head", "kl_div")
    both = layers + head
    assert isinstance(both, AlignmentList) and both.student is deep[1]
    assert students(both) == ["model.layers.0", "model.layers.1", "lm_head"]
    assert [each.loss.name for each in both] == ["mse", "mse", "kl_divergence"]
    assert students(layers) == ["model.layers.0", "model.layers.1"]  # not changed
    with pytest.raises(AlignmentError, match="made for different models"):
        layers + create_alignments(deep[1], deep[0], "lm_head")


@pytest.mark.parametrize("name", ["loss_weight", "learning_rate", "weight_decay", "max_grad_norm"])
def test_negative_numbers_are_refused(name: str) -> None:
    with pytest.raises(AlignmentError, match=rf"{name}=-1.*'b' is negative"):
        Alignment("a", "b", **{name: -1})


def test_models_may_be_given_by_folder(tmp_path) -> None:
    for name, model in (("teacher", bert(0)), ("student", bert(1, num_hidden_layers=1))):
        model.save_pretrained(tmp_path / name)
    teacher, student = str(tmp_path / "teacher"), str(tmp_path / "student")
    made = create_alignments(teacher, student, {r"bert\.encoder\.layer\.1": "bert.encoder.layer.0"})
    assert pairs(made) == [("bert.encoder.layer.1", "bert.encoder.layer.0")]
    assert (made.teacher, made.student) == (teacher, student)


def test_no_weight_is_read_for_names_alone(tmp_path) -> None:
    bert(0).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert len(create_alignments(str(tmp_path), str(tmp_path), r"bert\.encoder\.layer\.\d+")) == 2


def test_the_models_are_not_touched(deep) -> None:
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in deep]
    create_alignments(*deep, LAYERS, "cosine")
    for model, state in zip(deep, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert model.training and all(parameter.requires_grad for parameter in model.parameters())
