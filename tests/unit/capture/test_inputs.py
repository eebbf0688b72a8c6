"""What of a batch each model gets."""

import pytest
import torch
from torch import nn

from silverspoon_kd.capture import InputView
from silverspoon_kd.errors import DataError
from support.architectures import ARCHITECTURES, bert, resnet, t5, translation_rows
from support.tiny import collate, llama, qwen3

BATCH = {
    "input_ids": torch.ones(2, 3, dtype=torch.long),
    "attention_mask": torch.ones(2, 3, dtype=torch.long),
    "token_type_ids": torch.zeros(2, 3, dtype=torch.long),
    "labels": torch.full((2, 3), 5),
    "teacher_extra": torch.zeros(2),
}


def test_c_10_a_model_gets_what_its_forward_names() -> None:
    assert InputView(llama(layers=1, hidden=16), "teacher")(BATCH).keys() == {
        "input_ids",
        "attention_mask",
        "use_cache",
    }
    taken = InputView(bert(0), "student")(BATCH).keys() - {"use_cache"}
    assert taken == {"input_ids", "attention_mask", "token_type_ids"}
    assert "labels" in InputView(bert(0), "student")(BATCH, with_labels=True)


def test_c_10_a_model_that_takes_nothing_of_the_batch_is_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"teacher ResNetForImageClassification takes pixel_values.*has only input_ids, .*prepare_teacher",
    ):
        InputView(resnet(0), "teacher")(BATCH)
    with pytest.raises(DataError, match="takes input_ids"):
        InputView(llama(layers=1, hidden=16), "student")({"labels": BATCH["labels"]}, with_labels=True)


def test_plain_modules() -> None:
    class Named(nn.Module):
        def forward(self, teacher_extra, *, attention_mask=None):
            return teacher_extra

    class Anything(nn.Module):
        def forward(self, *args, **kwargs):
            return kwargs["input_ids"]

    assert InputView(Named(), "student")(BATCH).keys() == {"teacher_extra", "attention_mask"}
    assert InputView(Anything(), "student")(BATCH).keys() == BATCH.keys() - {"labels"}
    assert InputView(Anything(), "student")(BATCH, with_labels=True).keys() == BATCH.keys()


def test_c_09_no_cache_by_argument() -> None:
    model = qwen3(layers=1, hidden=16)
    assert model.config.use_cache is True
    assert InputView(model, "teacher")(BATCH)["use_cache"] is False
    assert InputView(model, "teacher")({**BATCH, "use_cache": True})["use_cache"] is True  # asked for in the batch
    assert model.config.use_cache is True
    assert model(**InputView(model, "teacher")(BATCH)).get("cache") is None
    images = InputView(resnet(0), "teacher")({"pixel_values": torch.zeros(1, 3, 8, 8)})
    assert "use_cache" not in images
    assert "use_cache" not in InputView(nn.Identity(), "teacher")({"input": BATCH["input_ids"]})


def test_views_see_through_wrappers() -> None:
    model = llama(layers=1, hidden=16)
    wanted = InputView(model, "student")(BATCH).keys()
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        assert InputView(wrapped, "student")(BATCH).keys() == wanted


def test_the_decoder_of_an_encoder_decoder_model_gets_the_shifted_labels() -> None:
    model, batch = t5(0), collate(translation_rows())
    inputs = InputView(model, "student")(batch)
    assert "labels" not in inputs
    for row, labels in zip(inputs["decoder_input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert row == [0, *(0 if label == -100 else label for label in labels[:-1])]
    torch.testing.assert_close(model(**inputs).logits, model(**batch).logits)
    with_labels = InputView(model, "student")(batch, with_labels=True)
    torch.testing.assert_close(model(**with_labels).loss, model(**batch).loss)


def test_the_decoders_own_inputs_are_kept() -> None:
    batch = {**collate(translation_rows()), "decoder_input_ids": torch.ones(4, 12, dtype=torch.long)}
    assert InputView(t5(0), "student")(batch)["decoder_input_ids"] is batch["decoder_input_ids"]
    embedded = {**collate(translation_rows()), "decoder_inputs_embeds": torch.ones(4, 12, 16)}
    assert "decoder_input_ids" not in InputView(t5(0), "student")(embedded)


def test_who_can_be_told_the_number_of_items() -> None:
    assert InputView(llama(layers=1, hidden=16), "student").takes_num_items
    assert not InputView(ARCHITECTURES["module_with_dict_batches"].build(0), "student").takes_num_items
