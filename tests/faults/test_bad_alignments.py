"""Alignments and losses that cannot work are refused before the first step, with everything left as it was."""

import ast

import pytest
import torch
from torch import nn

from silverspoon_kd import Alignment, BlockwiseDistiller, HolisticDistiller, ResponseBasedDistiller, create_alignments
from silverspoon_kd.errors import AlignmentError, LossError, TrainingError
from support.tiny import Rows, arguments, collate, qwen3
from support.untouched import refused

LAYERS = r"model\.layers\.\d+"


def build(folder, teacher, student, alignments, kind=HolisticDistiller, **changes):
    return kind(
        teacher,
        alignments,
        student_model=student,
        args=arguments(folder, **changes),
        train_dataset=Rows(),
        data_collator=collate,
    )


def test_pattern_that_matches_nothing(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    with refused(
        AlignmentError, r"'model\.layer\.\\\\d\+' matches no module.*Did you mean 'model.layers.0'", tmp_path, teacher
    ):
        create_alignments(teacher, student, r"model.layer.\d+")


def test_counts_that_differ_propose_a_map(tmp_path):
    teacher, student = qwen3(0, layers=4), qwen3(1, layers=2)
    with pytest.raises(AlignmentError, match="4 teacher modules and 2 student modules") as caught:
        create_alignments(teacher, student, LAYERS)
    proposal = str(caught.value).split("modules=")[1].split("}")[0] + "}"
    alignments = create_alignments(teacher, student, ast.literal_eval(proposal))
    assert [(a.teacher_module_name, a.student_module_name) for a in alignments] == [
        ("model.layers.1", "model.layers.0"),
        ("model.layers.3", "model.layers.1"),
    ]


@pytest.mark.parametrize("kind", [HolisticDistiller, BlockwiseDistiller])
def test_tuple_output_without_a_selector(tmp_path, kind):
    teacher, student = qwen3(0), qwen3(1)
    alignments = create_alignments(teacher, student, r"model\.layers\.\d+\.self_attn")
    with refused(
        AlignmentError,
        r"'model.layers.0.self_attn' is a tuple of 2 elements.*output_selector_index=0",
        tmp_path,
        teacher,
        student,
    ):
        build(tmp_path, teacher, student, alignments, kind)


def test_selector_out_of_range(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    alignments = create_alignments(teacher, student, r"model\.layers\.0\.self_attn", output_selector_index=5)
    with refused(AlignmentError, r"selector 5 of .*self_attn.* out of range.*2 elements", tmp_path, teacher, student):
        build(tmp_path, teacher, student, alignments)


@pytest.mark.parametrize("kind", [HolisticDistiller, BlockwiseDistiller])
def test_widths_that_differ_without_a_projector(tmp_path, kind):
    teacher, student = qwen3(0, hidden=32), qwen3(1, hidden=16)
    alignments = create_alignments(teacher, student, LAYERS, output_selector_index=0, auto_projector=False)
    match = r"'model.layers.0'.*different widths.*16\].*32\].*auto_projector=True"
    with refused(AlignmentError, match, tmp_path, teacher, student):
        build(tmp_path, teacher, student, alignments, kind)


def test_unknown_loss_has_its_near_name(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    with refused(LossError, r"no loss 'kl_divergance'.*Did you mean 'kl_divergence'", tmp_path, teacher, student):
        create_alignments(teacher, student, LAYERS, loss_function="kl_divergance")
    with refused(LossError, r"no loss 'kl_divergance'.*Did you mean 'kl_divergence'", tmp_path, teacher, student):
        ResponseBasedDistiller(student, teacher, soft_loss_fn="kl_divergance", args=arguments(tmp_path))


@pytest.mark.parametrize("kind", [HolisticDistiller, BlockwiseDistiller])
def test_loss_that_returns_no_scalar(tmp_path, kind):
    teacher, student = qwen3(0), qwen3(1)

    def per_element(student, teacher):
        return (student - teacher) ** 2

    alignments = create_alignments(teacher, student, LAYERS, loss_function=per_element, output_selector_index=0)
    match = r"'model.layers.0'.*'per_element' must return a scalar.*shape \[.*32\]"
    distiller = build(tmp_path, teacher, student, alignments, kind)
    with refused(LossError, match, tmp_path, teacher, student):
        distiller.train()


def test_soft_loss_that_returns_no_scalar(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    distiller = ResponseBasedDistiller(
        student,
        teacher,
        soft_loss_fn=lambda student, teacher: student - teacher,
        args=arguments(tmp_path),
        train_dataset=Rows(),
        data_collator=collate,
    )
    with refused(LossError, r"'logits'.*must return a scalar", tmp_path, teacher, student):
        distiller.train()


@pytest.mark.parametrize("kind", [HolisticDistiller, BlockwiseDistiller])
def test_nan_at_the_first_step_names_the_alignment(tmp_path, kind):
    teacher, student = qwen3(0), qwen3(1)
    healthy = create_alignments(teacher, student, r"model\.layers\.[013]", output_selector_index=0)
    broken = create_alignments(
        teacher,
        student,
        r"model\.layers\.2",
        output_selector_index=0,
        loss_function=lambda student, teacher: ((student - teacher) ** 2).mean() * float("nan"),
    )
    distiller = build(tmp_path, teacher, student, healthy + broken, kind, gradient_accumulation_steps=2)
    with refused(TrainingError, r"'model.layers.2' is not finite in the first step", tmp_path, teacher, student):
        distiller.train()


def test_infinity_of_the_teacher_at_the_first_step(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    with torch.no_grad():
        teacher.lm_head.weight[3] = float("inf")
    distiller = ResponseBasedDistiller(
        student, teacher, args=arguments(tmp_path), train_dataset=Rows(), data_collator=collate
    )
    with refused(TrainingError, r"'logits' is not finite in the first step.*teacher", tmp_path, teacher, student):
        distiller.train()


class Spare(nn.Module):
    """A net with a module that its forward leaves out."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.used, self.spare, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.used(x))


@pytest.mark.parametrize("kind", [HolisticDistiller, BlockwiseDistiller])
def test_i_14_module_that_never_runs_is_named(tmp_path, kind):
    teacher, student = Spare(0), Spare(1)
    rows = [{"x": torch.randn(4)} for _ in range(8)]
    with refused(TrainingError, r"'spare' of Spare did not run", tmp_path, teacher, student):
        kind(
            teacher,
            create_alignments(teacher, student, ["used", "spare"]),
            args=arguments(tmp_path),
            train_dataset=rows,
            data_collator=collate,
        )


def test_i_14_student_module_that_never_runs_is_named(tmp_path):
    teacher, student = Spare(0), Spare(1)
    with refused(RuntimeError, r"'spare' of Spare did not run", tmp_path, teacher, student):
        HolisticDistiller(
            teacher,
            create_alignments(teacher, student, {"used": "spare"}),
            args=arguments(tmp_path),
            train_dataset=[{"x": torch.randn(4)} for _ in range(8)],
            data_collator=collate,
        )


def test_i_14_module_that_stops_running_is_named(tmp_path):
    class Sometimes(Spare):
        def forward(self, x, use):
            return self.head(self.spare(x) if use.all() else self.used(x))

    teacher, student = Sometimes(0), Sometimes(1)
    rows = [{"x": torch.randn(4), "use": torch.tensor(index < 4)} for index in range(8)]
    distiller = HolisticDistiller(
        teacher,
        create_alignments(teacher, student, ["spare"]),
        args=arguments(tmp_path),
        train_dataset=rows,
        data_collator=collate,
    )
    with refused(TrainingError, r"'spare' of Sometimes did not run", tmp_path, teacher):
        distiller.train()


def test_unknown_module_of_a_hand_made_alignment(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    alignments = [Alignment("model.layers.0", "model.layer.0", 0, 0)]
    with refused(AlignmentError, r"no module 'model.layer.0'.*Did you mean 'model.layers.0'", tmp_path, teacher):
        build(tmp_path, teacher, student, alignments)


def test_no_alignments(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    with refused(AlignmentError, r"no alignments.*create_alignments", tmp_path, teacher, student):
        build(tmp_path, teacher, student, [])


def test_two_alignments_of_one_block(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    alignments = create_alignments(teacher, student, r"model\.layers\.0", output_selector_index=0)
    with refused(AlignmentError, r"'model.layers.0' is aligned twice", tmp_path, teacher, student):
        build(tmp_path, teacher, student, alignments + alignments, BlockwiseDistiller)
