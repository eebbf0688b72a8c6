"""Models given as module, folder or callable, and the tokenizers beside them."""

import pytest
import torch

from silverspoon_kd import BlockwiseDistiller, HolisticDistiller, ResponseBasedDistiller, create_alignments
from silverspoon_kd.errors import AlignmentError, ConfigurationError, TeacherError
from support.tiny import Rows, arguments, collate, distance, qwen3, weights

LAYERS = r"model\.layers\.\d+"


def _train(distiller_class, *args, folder, **kwargs):
    distiller = distiller_class(*args, args=arguments(folder), train_dataset=Rows(), data_collator=collate, **kwargs)
    distiller.train()
    return distiller


def test_models_given_as_folders_train_like_the_modules(tmp_path):
    teacher, student = qwen3(0), qwen3(5, hidden=24)
    teacher.save_pretrained(tmp_path / "teacher")
    student.save_pretrained(tmp_path / "student")
    by_name = create_alignments(str(tmp_path / "teacher"), str(tmp_path / "student"), LAYERS)
    named = _train(HolisticDistiller, str(tmp_path / "teacher"), by_name, folder=tmp_path / "a")
    given = _train(HolisticDistiller, teacher, create_alignments(teacher, student, LAYERS), folder=tmp_path / "b")
    # The loaded models attend with another kernel than the tiny ones were made with.
    assert distance(weights(named.root), weights(given.root)) < 1e-6
    assert named.student_model is not student


def test_teacher_given_as_callable(tmp_path):
    calls = []

    def build():
        calls.append(1)
        return qwen3(0)

    built = _train(ResponseBasedDistiller, qwen3(5), build, folder=tmp_path / "a")
    given = _train(ResponseBasedDistiller, qwen3(5), qwen3(0), folder=tmp_path / "b")
    assert calls == [1]
    assert distance(weights(built.root), weights(given.root)) == 0


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="teacher_model is a int"):
        ResponseBasedDistiller(qwen3(5), 7, args=arguments(tmp_path))
    with pytest.raises(TeacherError, match="returned a str"):
        ResponseBasedDistiller(qwen3(5), lambda: "no", args=arguments(tmp_path))
    with pytest.raises(TeacherError, match="cannot be loaded"):
        ResponseBasedDistiller(qwen3(5), str(tmp_path / "nowhere"), args=arguments(tmp_path))


def test_meta_weights_are_refused(tmp_path):
    with torch.device("meta"):
        empty = qwen3(0)
    with pytest.raises(TeacherError, match="not loaded"):
        ResponseBasedDistiller(qwen3(5), empty, args=arguments(tmp_path))


def test_hand_made_alignments_need_a_student(tmp_path):
    teacher, student = qwen3(0), qwen3(5)
    alignments = list(create_alignments(teacher, student, LAYERS))
    with pytest.raises(AlignmentError, match="student_model="):
        BlockwiseDistiller(teacher, alignments, args=arguments(tmp_path))
    BlockwiseDistiller(teacher, alignments, student, args=arguments(tmp_path))


def _tokenizer(folder, words):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0], pad_token=words[0])
    fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_tokenizers_that_read_other_texts_are_refused(tmp_path):
    words = [f"word{index}" for index in range(64)]
    qwen3(0).save_pretrained(tmp_path / "teacher")
    _tokenizer(tmp_path / "teacher", words)
    same = _tokenizer(tmp_path / "student", words)
    swapped = _tokenizer(tmp_path / "other", [*words[:10], words[11], words[10], *words[12:]])
    common = {"args": arguments(tmp_path / "out"), "train_dataset": Rows(), "data_collator": collate}
    ResponseBasedDistiller(qwen3(5), str(tmp_path / "teacher"), processing_class=same, **common)
    with pytest.raises(ConfigurationError, match="id 10 is 'word11'.*'word10'"):
        ResponseBasedDistiller(qwen3(5), str(tmp_path / "teacher"), processing_class=swapped, **common)
