"""The teacher is frozen, in evaluation mode, gets only what it takes, and is the same afterwards."""

import copy
import hashlib

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

from silverspoon_kd import HolisticDistiller, ResponseBasedDistiller, create_alignments
from silverspoon_kd.errors import ConfigurationError, TeacherError
from silverspoon_kd.teacher import check_loaded, check_separate
from support.architectures import ARCHITECTURES, bert, bert_classifier, bloom, text_rows
from support.distil import KINDS, make, training_logs
from support.tiny import Rows, arguments, collate, llama, qwen3, weights

every_kind = pytest.mark.parametrize("kind", KINDS)


def small(seed: int, **changes) -> nn.Module:
    return qwen3(seed, **{"layers": 2, "hidden": 16, **changes})


def digest(model: nn.Module) -> str:
    state = model.state_dict()
    return hashlib.sha256(
        b"".join(key.encode() + state[key].reshape(-1).view(torch.uint8).numpy().tobytes() for key in sorted(state))
    ).hexdigest()


def watch(model: nn.Module) -> list[dict]:
    """From now on, the keyword arguments of each forward, and the modules that were in training mode."""
    calls: list[dict] = []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        training = [name for name, each in module.named_modules() if each.training]
        calls.append({"args": args, "kwargs": kwargs, "training": training, "grad": torch.is_grad_enabled()})

    model.register_forward_pre_hook(note, with_kwargs=True)
    return calls


# --- mode ------------------------------------------------------------------------------------------------------------


@every_kind
def test_c_01_the_teacher_is_in_evaluation_mode_in_every_forward(tmp_path, kind: str) -> None:
    teacher = bert(0, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5).train()
    student = bert(1)
    pattern = ARCHITECTURES["bert"].pattern
    rows = list(Rows(4))
    distiller = make(
        kind,
        tmp_path,
        student=student,
        teacher=teacher,
        modules=pattern,
        given={"train_dataset": rows, "eval_dataset": rows},
        max_steps=-1,
        num_train_epochs=2,
        learning_rate=0.0,
        eval_strategy="epoch",
    )
    calls = watch(teacher)
    distiller.train()
    assert len(calls) == 4  # a step and an evaluation in each epoch
    assert [call["training"] for call in calls] == [[]] * 4
    assert not any(call["grad"] for call in calls)
    losses = [entry["loss"] for entry in training_logs(distiller)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] > 0  # the rows come in another order


def test_c_01_a_teacher_that_is_put_into_training_mode_meanwhile(tmp_path) -> None:
    teacher = bert(0, hidden_dropout_prob=0.5).train()

    class Meddler(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            teacher.train()

    distiller = ResponseBasedDistiller(
        bert(1),
        teacher,
        args=arguments(tmp_path, learning_rate=0.0),
        train_dataset=list(Rows(4)),
        data_collator=collate,
        callbacks=[Meddler()],
    )
    calls = watch(teacher)
    distiller.train()
    assert [call["training"] for call in calls] == [[]] * 4
    losses = [entry["loss"] for entry in training_logs(distiller)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_c_01_batch_norm_keeps_its_statistics(tmp_path) -> None:
    architecture = ARCHITECTURES["resnet"]
    teacher, student = architecture.build(0).train(), architecture.build(1)
    before = digest(teacher)
    rows = [{**row, "pixel_values": row["pixel_values"].float()} for row in architecture.rows()]
    make("response", tmp_path, student=student, teacher=teacher, given={"train_dataset": rows}).train()
    assert digest(teacher) == before
    assert student.resnet.embedder.embedder.normalization.num_batches_tracked == 4


# --- teacher and student are two -------------------------------------------------------------------------------------


@every_kind
def test_c_02_nothing_of_the_teacher_is_saved_or_trained(tmp_path, kind: str) -> None:
    teacher, student = small(0, hidden=24), small(1)
    distiller = make(kind, tmp_path, student=student, teacher=teacher, max_steps=2, save_strategy="steps", save_steps=2)
    distiller.train()
    assert not teacher.training
    theirs = {id(tensor) for tensor in teacher.parameters()} | {id(tensor) for tensor in teacher.buffers()}
    for model in (distiller.model, distiller.model_wrapped, distiller.root):
        names = [name for name, _ in model.named_parameters()]
        assert not [name for name in names if "teacher" in name]
        assert {name.split(".")[0] for name in names} <= {"student", "projectors"}
        assert not theirs & {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        assert teacher not in list(model.modules())
    folder = tmp_path / "checkpoint-2"
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == student.state_dict().keys()
    loaded, report = type(student).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in student.state_dict().items())


def test_c_03_a_teacher_that_is_the_student_is_refused(tmp_path) -> None:
    model = small(0)
    with pytest.raises(ValueError, match="are the same object"):
        make("response", tmp_path, student=model, teacher=model)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())


def test_c_03_a_shared_parameter_is_refused_by_name(tmp_path) -> None:
    teacher, student = small(0), small(1)
    student.model.embed_tokens.weight = teacher.model.embed_tokens.weight
    with pytest.raises(ConfigurationError, match=r"share the parameter 'model\.embed_tokens\.weight'.*deepcopy"):
        make("holistic", tmp_path, student=student, teacher=teacher)
    assert all(parameter.requires_grad for parameter in [*student.parameters(), *teacher.parameters()])
    check_separate(copy.deepcopy(student), teacher)


@every_kind
def test_c_03_the_student_trains_with_all_it_has(tmp_path, kind: str) -> None:
    student = small(1, attention_dropout=0.1)
    distiller = make(kind, tmp_path, student=student, teacher=small(0))
    modes: list[list[str]] = []
    student.model.register_forward_pre_hook(
        lambda module, args, kwargs: modes.append([n for n, m in student.named_modules() if not m.training]),
        with_kwargs=True,
    )
    distiller.train()
    assert modes == [[]] * 4  # in training mode as a whole, once a step
    assert student.training
    assert all(parameter.requires_grad for parameter in student.parameters())


# --- weights ---------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c_04_the_teachers_weights_never_change(tmp_path, kind: str, dtype: torch.dtype) -> None:
    teacher, student = small(0).to(dtype), small(1, hidden=24)
    for parameter in teacher.parameters():
        parameter.requires_grad_(True)
    before, start = digest(teacher), weights(student)
    distiller = make(
        kind,
        tmp_path,
        student=student,
        teacher=teacher,
        max_steps=5,
        learning_rate=0.1,
        weight_decay=0.1,
        bf16=True,
        optim="adamw_torch",
    )
    distiller.train()
    assert digest(teacher) == before
    assert {parameter.dtype for parameter in teacher.parameters()} == {dtype}
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())
    trained = {id(parameter) for group in distiller.optimizer.param_groups for parameter in group["params"]}
    assert trained and not trained & {id(parameter) for parameter in teacher.parameters()}
    assert any(not torch.equal(value, start[name]) for name, value in weights(student).items())


@every_kind
def test_c_08_the_teacher_computes_the_same_before_and_after(tmp_path, kind: str) -> None:
    teacher, batch = small(0), {"input_ids": torch.arange(1, 13).view(1, 12)}

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return teacher(**batch).logits

    before = logits()
    distiller = make(kind, tmp_path, student=small(1), teacher=teacher)
    assert torch.equal(logits(), before)
    distiller.train()
    assert torch.equal(logits(), before)
    assert distiller.teacher is teacher


def test_c_08_a_teacher_without_weights_is_refused(tmp_path) -> None:
    with torch.device("meta"):
        empty = small(0)
    with pytest.raises(TeacherError, match=r"weights are not loaded: 'model\.embed_tokens\.weight' and \d+ more"):
        make("response", tmp_path, student=small(1), teacher=empty)
    check_loaded(small(0))


def test_c_08_a_teacher_by_folder_has_the_saved_weights(tmp_path) -> None:
    teacher = small(0)
    teacher.save_pretrained(tmp_path / "teacher")
    distiller = ResponseBasedDistiller(
        small(1),
        str(tmp_path / "teacher"),
        args=arguments(tmp_path / "out"),
        train_dataset=Rows(),
        data_collator=collate,
    )
    assert digest(distiller.teacher) == digest(teacher)
    assert not distiller.teacher.training


# --- the caller's models afterwards ----------------------------------------------------------------------------------


def hooks(*models: nn.Module) -> dict[str, int]:
    """How many hooks there are on the models, and for all modules together, where there are any."""
    everywhere = torch.nn.modules.module
    found = {"all modules": len(everywhere._global_forward_hooks) + len(everywhere._global_forward_pre_hooks)}
    for index, model in enumerate(models):
        for name, module in model.named_modules():
            found[f"{index}.{name}"] = sum(
                len(each) for each in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            )
    return {name: count for name, count in found.items() if count}


class Failing(Rows):
    """Rows of which the second batch cannot be read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.read >= 5:  # one row is read for its columns
            raise OSError("the disk is gone")
        self.read += 1
        return super().__getitem__(index)

    def __init__(self) -> None:
        super().__init__()
        self.read = 0


@every_kind
def test_c_05_only_the_users_hooks_are_left(tmp_path, kind: str) -> None:
    teacher, student = small(0), small(1)
    for model in (teacher, student):
        model.model.layers[0].register_forward_hook(lambda *_: None)
        model.model.layers[1].register_forward_pre_hook(lambda *_: None)
    mine = hooks(teacher, student)
    forwards = [type(module).forward for module in (*teacher.modules(), *student.modules())]

    distiller = make(kind, tmp_path, student=student, teacher=teacher)
    assert hooks(teacher, student) == mine
    distiller.train()
    assert hooks(teacher, student) == mine
    first = training_logs(distiller)
    distiller.train()
    assert hooks(teacher, student) == mine
    again = training_logs(distiller)[-4:]
    parts = [{key for key in entry if key.startswith("loss/")} for entry in (*first, *again)]
    assert all(part == parts[0] for part in parts) and len(parts[0]) == (1 if kind == "response" else 2)
    assert [type(module).forward for module in (*teacher.modules(), *student.modules())] == forwards
    assert not [module for module in (*teacher.modules(), *student.modules()) if "forward" in vars(module)]


@every_kind
def test_c_05_only_the_users_hooks_are_left_after_a_failure(tmp_path, kind: str) -> None:
    teacher, student = small(0), small(1)
    student.model.layers[0].register_forward_hook(lambda *_: None)
    mine = hooks(teacher, student)
    distiller = make(kind, tmp_path, student=student, teacher=teacher, given={"train_dataset": Failing()})
    with pytest.raises(OSError, match="the disk is gone"):
        distiller.train()
    assert hooks(teacher, student) == mine
    assert all(parameter.requires_grad for parameter in student.parameters())


def test_c_05_only_the_users_hooks_are_left_after_a_failing_loss(tmp_path) -> None:
    teacher, student = small(0), small(1)
    seen = []

    def loss(own, wanted):
        seen.append(own)
        if len(seen) == 3:
            raise ArithmeticError("no loss today")
        return (own - wanted).square().mean()

    alignments = create_alignments(teacher, student, r"model\.layers\.\d+", loss, output_selector_index=0)
    distiller = HolisticDistiller(
        teacher, alignments, args=arguments(tmp_path), train_dataset=Rows(), data_collator=collate
    )
    with pytest.raises(ArithmeticError, match="no loss today"):
        distiller.train()
    assert hooks(teacher, student) == {}


def test_the_teacher_stays_frozen_and_in_evaluation_mode(tmp_path) -> None:
    """It could serve the next distiller at once; who wants to train it again says so."""
    teacher = small(0).train()
    make("response", tmp_path, student=small(1), teacher=teacher).train()
    assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


# --- random numbers --------------------------------------------------------------------------------------------------


def test_c_07_the_teacher_takes_no_random_numbers_from_the_student(tmp_path) -> None:
    losses = []
    for index, dropout in enumerate((0.0, 0.3)):
        teacher = bert(0, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
        student = bert(1, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
        distiller = make("response", tmp_path / str(index), student=student, teacher=teacher)
        distiller.train()
        losses.append([entry["loss"] for entry in training_logs(distiller)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4


# --- what the teacher gets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [small, lambda seed: bloom(seed)], ids=["qwen3", "bloom"])
def test_c_09_no_cache_and_only_the_selected_output(tmp_path, build) -> None:
    teacher, student = build(0), build(1)
    pattern = r"transformer\.h\.\d+" if teacher.config.model_type == "bloom" else r"model\.layers\.\d+"
    shapes = []

    def loss(own, wanted):
        shapes.append((tuple(own.shape), tuple(wanted.shape)))
        return (own - wanted).square().mean()

    alignments = create_alignments(teacher, student, pattern, loss, output_selector_index=0)
    calls = [watch(teacher), watch(student)]
    distiller = HolisticDistiller(
        teacher,
        alignments,
        args=arguments(tmp_path, max_steps=3),
        train_dataset=Rows(low=64, high=64, pad_to=64),
        data_collator=collate,
    )
    distiller.train()
    assert shapes == [((4 * 64, 16), (4 * 64, 16))] * 6
    for model, seen in zip((teacher, student), calls, strict=True):
        assert len(seen) >= 3
        assert all(call["kwargs"].get("use_cache") is False for call in seen[-3:])
        assert model.config.use_cache is True


def test_c_10_the_teacher_gets_no_column_it_does_not_know(tmp_path) -> None:
    teacher, student = llama(0, layers=2, hidden=16), bert(1)
    rows = text_rows(token_type_ids=lambda row: torch.zeros_like(row["input_ids"]))
    options = {"alpha": 0.5, "fused_losses": False}  # whose student gets the labels too
    distiller = make("response", tmp_path, student=student, teacher=teacher, given={"train_dataset": rows}, **options)
    calls, own = watch(teacher), watch(student)
    distiller.train()
    assert [call["kwargs"].keys() for call in calls] == [{"input_ids", "attention_mask", "use_cache"}] * 4
    assert all({"token_type_ids", "labels"} <= call["kwargs"].keys() for call in own)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_c_10_the_teacher_gets_no_labels(tmp_path, alpha: float) -> None:
    teacher, student = bert_classifier(0, num_labels=2), bert_classifier(1, num_labels=6)
    rows = text_rows(labels=lambda row: torch.tensor(5))
    distiller = make(
        "holistic",
        tmp_path,
        student=student,
        teacher=teacher,
        modules=ARCHITECTURES["bert_classifier"].pattern,
        given={"train_dataset": rows},
        alpha=alpha,
    )
    calls, own = watch(teacher), watch(student)
    distiller.train()
    assert len(calls) == 4 and not any("labels" in call["kwargs"] for call in calls)
    assert all(("labels" in call["kwargs"]) is (alpha > 0) for call in own)


def test_c_10_a_teacher_that_can_use_nothing_is_refused_before_training(tmp_path) -> None:
    teacher, student = ARCHITECTURES["resnet"].build(0), bert_classifier(1)
    with pytest.raises(ValueError, match=r"teacher ResNet\w+ takes pixel_values"):
        make("response", tmp_path, student=student, teacher=teacher, given={"train_dataset": text_rows()})
