"""A teacher in processes of its own, with this process as the student."""

import multiprocessing
from collections import UserDict

import psutil
import pytest
import torch
from torch import nn

from silverspoon_kd import HolisticDistiller, ResponseBasedDistiller, create_alignments
from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu
from silverspoon_kd.errors import AlignmentError, PlacementError
from support.architectures import ARCHITECTURES
from support.distil import make, training_logs
from support.more_models import bert
from support.tiny import Rows, arguments, collate, distance, llama, qwen3, weights

pytestmark = pytest.mark.multiprocess

OPTIONS = {"learning_rate": 1.0, "report_to": "none"}


@pytest.fixture
def placement(monkeypatch):
    """One CPU slot of the teacher's own."""
    monkeypatch.setenv("SILVERSPOON_CPU_SLOTS", "4")
    wish = TeacherPlacement([3], device_type="cpu")
    setup_split_gpu(wish)
    return wish


def finish(distiller):
    """Train, close, and return losses and weights."""
    distiller.train()
    distiller._executor.close()
    return [entry["loss"] for entry in training_logs(distiller)], weights(distiller.root)


def check_equal(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert distance(found[1], expected[1]) < 1e-6


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_j_07_loader_workers(method, placement, tmp_path):
    before = multiprocessing.get_start_method(allow_none=True)
    expected = finish(make("holistic", tmp_path, **OPTIONS))
    multiprocessing.set_start_method(method, force=True)
    try:
        found = finish(make("holistic", tmp_path, teacher_placement=placement, dataloader_num_workers=2, **OPTIONS))
    finally:
        multiprocessing.set_start_method(before, force=True)
    check_equal(found, expected)
    assert not [each for each in psutil.Process().children() if "silverspoon_kd" in " ".join(each.cmdline())]


def test_the_log_tells_how_long_the_student_waited_and_what_it_got(placement, tmp_path):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "eval_strategy": "steps"}
    given = {"eval_dataset": Rows(n=2)}
    for wish in (None, placement):
        distiller = make("holistic", tmp_path, given=given, teacher_placement=wish, eval_steps=1, **options, **OPTIONS)
        finish(distiller)
        logs = training_logs(distiller)
        if wish is None:
            assert not [key for entry in logs for key in entry if key.startswith("teacher_")]
    # Four layers, of two micro-batches of two rows; what evaluation gets is not counted.
    assert [entry["teacher_bytes"] for entry in logs] == [2 * 4 * (2 * 12 * 32) * 4] * 4
    assert all(0 < entry[name] < 30 for entry in logs for name in ("teacher_wait", "teacher_link"))


def test_the_head_of_a_teacher_given_by_its_folder(placement, tmp_path):
    teacher, found = llama(0, tie_word_embeddings=True), []
    teacher.save_pretrained(tmp_path / "teacher")
    for wish, source in [(None, teacher), (placement, str(tmp_path / "teacher"))]:
        student = llama(1, hidden=16)
        alignments = create_alignments(
            teacher, student, r"model\.layers\.[13]", "logit_lens_kl", output_selector_index=0
        )
        args = arguments(tmp_path / "run", teacher_placement=wish, **OPTIONS)
        distiller = HolisticDistiller(
            source, alignments, student, args=args, train_dataset=Rows(), data_collator=collate
        )
        found.append(finish(distiller))
        heads = [each.loss.head for each in distiller._objective.alignments]
        assert heads[0].data_ptr() == heads[1].data_ptr()
        assert torch.equal(heads[0], teacher.lm_head.weight)
    check_equal(*found)


def test_an_aligned_head_and_a_layer_without_logits(placement, tmp_path):
    teacher, found = llama(0, initializer_range=0.1), []
    teacher.save_pretrained(tmp_path / "teacher")
    for wish, fused, source in [(None, False, teacher), (placement, True, str(tmp_path / "teacher"))]:
        student = llama(1, hidden=16, initializer_range=0.1)
        alignments = create_alignments(teacher, student, "lm_head", "kl_divergence", output_selector_index=0)
        alignments = create_alignments(teacher, student, r"model\.layers\.2", output_selector_index=0) + alignments
        args = arguments(tmp_path / "run", teacher_placement=wish, fused_losses=fused, alpha=0.2, **OPTIONS)
        given = {"train_dataset": Rows(), "data_collator": collate}
        distiller = HolisticDistiller(source, alignments, student, args=args, **given)
        found.append(finish(distiller))
    # A layer and what comes into the head, of the width of the teacher; logits are twice as wide.
    assert training_logs(distiller)[-1]["teacher_bytes"] == 2 * (4 * 12 * 32) * 4
    check_equal(*found)


def test_a_teacher_without_a_head(placement, tmp_path):
    for wish in (None, placement):
        alignment = {"encoder.layer.1": {"loss_function": "logit_lens_kl"}}
        with pytest.raises(AlignmentError, match="'logit_lens_kl' needs the matrix .* but BertModel has none"):
            make("holistic", tmp_path, teacher=bert(0), student=bert(1), modules=r"encoder\.layer\.1",
                 alignment=alignment, teacher_placement=wish, **OPTIONS)  # fmt: skip


class Nested(nn.Module):
    """A model that takes tensors in containers, and things that are none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 8)

    def forward(self, parts, pair, nothing, name):
        assert nothing is None and set(name) == {"a text"} and len(pair) == 2
        return {"logits": self.linear(parts["x"] + parts["inner"]["y"] + pair[0] - pair[1])}


def nested_batch(rows):
    """A batch of two rows with every kind of container."""
    x = torch.stack([row["x"] for row in rows])
    return {
        "parts": UserDict({"x": x, "inner": {"y": 2 * x}}),
        "pair": [x + 1, x * x],
        "nothing": None,
        "name": ["a text"] * len(rows),
    }


@pytest.mark.parametrize("own_process", [False, True], ids=["beside", "own-process"])
def test_j_09_nested_batches(own_process, placement, tmp_path):
    rows = [{"x": torch.randn(4)} for _ in range(8)]
    args = arguments(
        tmp_path,
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=0.0,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        report_to="none",
        teacher_placement=placement if own_process else None,
    )
    teacher, student = Nested(0), Nested(1)
    with torch.no_grad():
        batches = [nested_batch(rows[:2]), nested_batch(rows[2:4])]
        p = [teacher(**batch)["logits"].log_softmax(-1) for batch in batches]
        q = [student(**batch)["logits"].log_softmax(-1) for batch in batches]
        expected = [float((one.exp() * (one - other)).sum(-1).mean()) for one, other in zip(p, q, strict=True)]
    distiller = ResponseBasedDistiller(student, teacher, args=args, train_dataset=rows, data_collator=nested_batch)
    assert finish(distiller)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_b_12_a_quantised_teacher_stays_so(placement, tmp_path):
    found = []
    for wish in (None, placement):
        teacher = torch.ao.quantization.quantize_dynamic(qwen3(0).eval(), {nn.Linear}, dtype=torch.qint8)
        distiller = make("holistic", tmp_path, teacher=teacher, teacher_placement=wish, **OPTIONS)
        found.append(finish(distiller))
    check_equal(*found)
    plain = finish(make("holistic", tmp_path, **OPTIONS))
    assert distance(plain[1], found[0][1]) > 1e-5


@pytest.mark.parametrize("name", ["t5"])
def test_a_decoder_that_is_fed_with_the_labels(name, placement, tmp_path):
    architecture = ARCHITECTURES[name]
    found = []
    for wish in (None, placement):
        teacher, student = architecture.pair()
        given = {"train_dataset": architecture.rows()}
        distiller = make(
            "response", tmp_path, teacher=teacher, student=student, given=given, teacher_placement=wish, **OPTIONS
        )
        found.append(finish(distiller))
    check_equal(*found)


@pytest.fixture
def two_slots(monkeypatch):
    """Tensor parallel over two CPU slots."""
    monkeypatch.setenv("SILVERSPOON_CPU_SLOTS", "4")
    wish = TeacherPlacement([2, 3], "tp", device_type="cpu")
    setup_split_gpu(wish)
    return wish


def test_e_18_heads_that_do_not_divide_start_no_process(two_slots, monkeypatch, tmp_path):
    monkeypatch.setattr("silverspoon_kd.teacher.dedicated.World", None)
    teacher = llama(num_attention_heads=3, num_key_value_heads=3, hidden=24)
    with pytest.raises(ValueError, match="num_attention_heads=3 of LlamaForCausalLM does not divide by it"):
        make("response", tmp_path, teacher=teacher, teacher_placement=two_slots)


def test_activations_that_tensor_parallel_processes_have_a_part_of_are_refused(two_slots, tmp_path):
    with pytest.raises(PlacementError, match=r"splits the output of 'model\.layers\.1\.mlp\.up_proj'.* of \[.*, 64\]"):
        make("holistic", tmp_path, modules=r"model\.layers\.1\.mlp\.up_proj", teacher_placement=two_slots)
