"""Pairs of models that cannot work are refused when the distiller is made, with everything left as it was."""

import copy
import logging

import pytest
import torch

from silverspoon_kd import HolisticDistiller, ResponseBasedDistiller, create_alignments
from silverspoon_kd.errors import ConfigurationError, TeacherError
from support.tiny import Rows, arguments, collate, qwen3
from support.untouched import condition, refused

LAYERS = r"model\.layers\.\d+"


def response(folder, student, teacher, **changes):
    return ResponseBasedDistiller(
        student, teacher, args=arguments(folder), train_dataset=Rows(), data_collator=collate, **changes
    )


def test_one_object_as_teacher_and_student(tmp_path):
    model = qwen3(0)
    with refused(ConfigurationError, r"same object.*Load the teacher separately", tmp_path, model):
        response(tmp_path, model, model)


def test_shared_parameter_is_named(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    student.model.embed_tokens.weight = teacher.model.embed_tokens.weight
    match = r"share the parameter 'model.embed_tokens.weight'.*deepcopy"
    with refused(ConfigurationError, match, tmp_path, teacher, student):
        response(tmp_path, student, teacher)
    with refused(ConfigurationError, match, tmp_path, teacher, student):
        HolisticDistiller(
            teacher, create_alignments(teacher, student, LAYERS), args=arguments(tmp_path), train_dataset=Rows()
        )


def test_advice_about_shared_parameters_works(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    student.model.embed_tokens.weight = teacher.model.embed_tokens.weight
    response(tmp_path, copy.deepcopy(student), teacher).train()


@pytest.mark.parametrize("sizes", [(64, 5000), (5000, 64), (64, 200)])
def test_vocabularies_that_cannot_be_compared(tmp_path, sizes):
    student, teacher = qwen3(1, vocab=sizes[0]), qwen3(0, vocab=sizes[1])
    match = rf"student's vocabulary has {sizes[0]} entries and the teacher's {sizes[1]}.*one tokenizer"
    with refused(ConfigurationError, match, tmp_path, teacher, student):
        response(tmp_path, student, teacher)
    with refused(ValueError, match, tmp_path, teacher, student):
        HolisticDistiller(
            teacher,
            create_alignments(teacher, student, LAYERS, output_selector_index=0),
            args=arguments(tmp_path),
            train_dataset=Rows(vocab=min(sizes)),
        )


def test_teacher_without_weights(tmp_path):
    student = qwen3(1)
    with torch.device("meta"):
        teacher = qwen3(0)
    with refused(TeacherError, r"weights are not loaded: 'model.embed_tokens.weight'", tmp_path, student):
        response(tmp_path, student, teacher)
    assert all(parameter.requires_grad for parameter in teacher.parameters())


def test_optimizer_over_another_model(tmp_path):
    teacher, student = qwen3(0), qwen3(1)
    optimizer = torch.optim.SGD(qwen3(2).parameters(), lr=0.1)
    with refused(ConfigurationError, r"not the student's", tmp_path, teacher, student):
        response(tmp_path, student, teacher, optimizers=(optimizer, None))


def test_failure_in_the_middle_of_training_leaves_the_models_usable(tmp_path):
    class Breaks(Rows):
        broken = True

        def __getitem__(self, index):
            if self.broken and index == 9:
                raise OSError("disk gone")
            return super().__getitem__(index)

    teacher, student = qwen3(0), qwen3(1)
    student.model.layers[3].requires_grad_(False)
    student.eval()
    rows = Breaks(n=12)
    distiller = HolisticDistiller(
        teacher,
        create_alignments(teacher, student, r"model\.layers\.0", output_selector_index=0),
        args=arguments(tmp_path, max_steps=-1, num_train_epochs=1),
        train_dataset=rows,
        data_collator=collate,
    )
    flags = {name: parameter.requires_grad for name, parameter in student.named_parameters()}
    with pytest.raises(OSError, match="disk gone"):
        distiller.train()
    assert {name: parameter.requires_grad for name, parameter in student.named_parameters()} == flags
    assert not any(module.training for module in student.modules())
    assert all(parameter.grad is None for parameter in [*student.parameters(), *teacher.parameters()])
    for model in (teacher, student):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not distiller.is_in_train
    rows.broken = False
    assert distiller.train().global_step == 3


def test_reused_arguments_are_never_modified(tmp_path, caplog):
    wish = {"use_reentrant": True}
    args = arguments(
        tmp_path,
        label_smoothing_factor=0.1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=wish,
        max_grad_norm=None,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        alpha=0.5,
    )
    before, fields = args.to_dict(), copy.deepcopy({k: v for k, v in vars(args).items() if k != "distributed_state"})
    losses = []
    with caplog.at_level(logging.WARNING, logger="silverspoon_kd"):
        for kind in ("holistic", "response", "holistic"):
            teacher, student = qwen3(0), qwen3(1)
            if kind == "response":
                distiller = ResponseBasedDistiller(
                    student, teacher, args=args, train_dataset=Rows(), data_collator=collate
                )
            else:
                alignments = create_alignments(teacher, student, LAYERS, output_selector_index=0)
                distiller = HolisticDistiller(
                    teacher,
                    alignments,
                    args=args,
                    train_dataset=Rows(),
                    data_collator=collate,
                    prepare_student_inputs=lambda batch: batch,
                )
            losses.append(distiller.train().training_loss)
            assert args.to_dict() == before
            assert {k: v for k, v in vars(args).items() if k != "distributed_state"} == fields
    assert losses[0] == losses[2] != losses[1]
    assert wish == {"use_reentrant": True}


def test_arguments_that_the_trainer_refuses(tmp_path):
    """The error is the Trainer's; the teacher is thawed again."""
    teacher, student = qwen3(0), qwen3(1)
    before = condition(teacher), condition(student)
    with pytest.raises(ValueError, match="eval_dataset"):
        ResponseBasedDistiller(
            student,
            teacher,
            args=arguments(tmp_path, eval_strategy="steps"),
            train_dataset=Rows(),
            data_collator=collate,
        )
    assert (condition(teacher), condition(student)) == before
    response(tmp_path, student, teacher).train()
