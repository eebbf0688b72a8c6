"""Which positions count: compared with loops over single positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from silverspoon_kd.errors import DataError
from silverspoon_kd.objectives import UNITS, Conventions, conventions_of, positions_of
from support.architectures import ARCHITECTURES, t5, translation_rows
from support.tiny import Rows, collate, llama

CAUSAL = Conventions(shifts_labels=True, encoder_decoder=False)
PLAIN = Conventions(shifts_labels=False, encoder_decoder=False)
TRANSLATION = Conventions(shifts_labels=False, encoder_decoder=True)


def counts(batch, conventions: Conventions) -> dict[str, int]:
    return dict(zip(UNITS, positions_of(batch, conventions).counts().tolist(), strict=True))


def ids(rows: int = 2, length: int = 4) -> torch.Tensor:
    return torch.ones(rows, length, dtype=torch.long)


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_h_04_tokens_are_the_unpadded_positions() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])  # padded on the right, and on the left
    positions = positions_of({"input_ids": ids(), "attention_mask": mask}, CAUSAL)
    assert positions.masks["tokens"].tolist() == [[True, True, False, False], [False, True, True, True]]
    assert counts({"input_ids": ids(), "attention_mask": mask}, CAUSAL) == {
        "rows": 2,
        "tokens": 5,
        "decoder_tokens": 0,
        "targets": 5,  # no labels: every unpadded position
        "task": 2,
    }


def test_without_a_mask_all_tokens_count() -> None:
    assert counts({"input_ids": ids()}, CAUSAL)["tokens"] == 8


def test_images_and_vectors_have_rows_only() -> None:
    batch = {"pixel_values": torch.zeros(3, 1, 2, 2), "labels": torch.tensor([0, 2, -100])}
    assert counts(batch, PLAIN) == {"rows": 3, "tokens": 0, "decoder_tokens": 0, "targets": 0, "task": 2}
    assert positions_of(batch, PLAIN).masks == {}


def test_a_mask_over_pairs_of_positions_is_no_token_mask() -> None:
    square = torch.ones(2, 1, 4, 4)
    assert counts({"input_ids": ids(), "attention_mask": square}, CAUSAL)["tokens"] == 8


def test_rows_are_those_of_the_tensor_that_is_there() -> None:
    assert positions_of({"features": [torch.zeros(5, 2)], "name": "x"}, PLAIN).rows == 5
    assert positions_of({"scale": torch.tensor(1.0), "features": torch.zeros(5, 2)}, PLAIN).rows == 5
    with pytest.raises(DataError, match=r"keys \['name'\] holds no tensor.*collator"):
        positions_of({"name": "x"}, PLAIN)


# --- targets ---------------------------------------------------------------------------------------------------------


rows_of_flags = st.integers(1, 4).flatmap(
    lambda n: st.integers(1, 7).flatmap(
        lambda length: st.tuples(
            st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=n, max_size=n),
            st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=n, max_size=n),
        )
    )
)


@given(rows_of_flags)
def test_h_04_targets_of_causal_models_by_hand(flags) -> None:
    labelled, unpadded = flags
    batch = {
        "input_ids": ids(len(labelled), len(labelled[0])),
        "attention_mask": torch.tensor(unpadded).long(),
        "labels": torch.where(torch.tensor(labelled), 7, -100),
    }
    wanted = [
        [
            # Position i predicts the token at i + 1, which must be labelled; neither of them may be padding.
            i + 1 < len(row) and row[i + 1] and real[i] and real[i + 1]
            for i in range(len(row))
        ]
        for row, real in zip(labelled, unpadded, strict=True)
    ]
    assert positions_of(batch, CAUSAL).masks["targets"].tolist() == wanted
    # The student's own loss knows no padding: it counts every label but the first of a row.
    assert counts(batch, CAUSAL)["task"] == sum(sum(row[1:]) for row in labelled)


@given(rows_of_flags)
def test_h_04_targets_that_are_not_shifted_by_hand(flags) -> None:
    labelled, unpadded = flags
    batch = {
        "input_ids": ids(len(labelled), len(labelled[0])),
        "attention_mask": torch.tensor(unpadded).long(),
        "labels": torch.where(torch.tensor(labelled), 7, -100),
    }
    wanted = [[a and b for a, b in zip(row, real, strict=True)] for row, real in zip(labelled, unpadded, strict=True)]
    assert positions_of(batch, PLAIN).masks["targets"].tolist() == wanted
    assert counts(batch, PLAIN)["task"] == sum(map(sum, labelled))


def test_h_04_padding_and_empty_rows_add_nothing() -> None:
    batch = collate(list(Rows(4)))
    wanted = counts(batch, CAUSAL)
    wider = {
        key: torch.cat([value, torch.full((4, 5), {"labels": -100}.get(key, 0))], dim=1) for key, value in batch.items()
    }
    assert counts(wider, CAUSAL) == wanted
    with_empty = {
        key: torch.cat([value, torch.full((2, 12), {"labels": -100}.get(key, 0))]) for key, value in batch.items()
    }
    assert counts(with_empty, CAUSAL) == {**wanted, "rows": 6}
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert counts(nothing, CAUSAL) == {**wanted, "targets": 0, "task": 0}


def test_labels_of_whole_rows_leave_the_tokens_alone() -> None:
    batch = {"input_ids": ids(), "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]), "labels": torch.ones(2)}
    assert counts({**batch, "labels": torch.tensor([1, -100])}, PLAIN) == {
        "rows": 2,
        "tokens": 6,
        "decoder_tokens": 0,
        "targets": 6,
        "task": 1,
    }
    assert counts(batch, PLAIN)["task"] == 2  # real numbers to regress on: -100 would mean nothing


# --- encoder and decoder ---------------------------------------------------------------------------------------------


def test_encoder_and_decoder_have_masks_of_their_own() -> None:
    batch = collate(translation_rows())
    positions = positions_of(batch, conventions_of(t5(0)))
    assert torch.equal(positions.masks["tokens"], batch["attention_mask"] == 1)
    assert torch.equal(positions.masks["decoder_tokens"], batch["labels"] != -100)
    assert torch.equal(positions.masks["targets"], batch["labels"] != -100)  # not shifted


def test_a_decoder_mask_that_is_given_decides() -> None:
    batch = {
        "input_ids": ids(2, 4),
        "labels": torch.tensor([[5, 6, 7], [5, -100, 7]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    }
    positions = positions_of(batch, TRANSLATION)
    assert positions.masks["decoder_tokens"].tolist() == [[True, True, False], [True, True, True]]
    assert positions.masks["targets"].tolist() == [[True, True, False], [True, False, True]]
    assert counts(batch, TRANSLATION) == {"rows": 2, "tokens": 8, "decoder_tokens": 5, "targets": 4, "task": 5}


def test_h_04_decoder_ids_that_a_collator_made_of_the_labels_do_not_count_padding() -> None:
    """DataCollatorForSeq2Seq adds decoder_input_ids and no mask for them."""
    model, batch = t5(0), collate(translation_rows())
    made = {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}
    for unit, mask in positions_of(batch, TRANSLATION).masks.items():
        assert torch.equal(positions_of(made, TRANSLATION).masks[unit], mask), unit


def test_decoder_ids_without_labels_all_count() -> None:
    batch = {"input_ids": ids(2, 4), "decoder_input_ids": ids(2, 3)}
    assert counts(batch, TRANSLATION)["decoder_tokens"] == 6
    assert positions_of(batch, TRANSLATION).masks["targets"].shape == (2, 3)


# --- conventions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_conventions_are_those_of_the_models_own_loss(name: str) -> None:
    """The model's own loss tells whether it shifts: a label on the first position counts only without a shift."""
    architecture = ARCHITECTURES[name]
    model, batch = architecture.build(0), architecture.batch()
    conventions = conventions_of(model)
    assert conventions.encoder_decoder is (name == "t5")
    if not architecture.own_loss or batch["labels"].dim() == 1:
        assert not conventions.shifts_labels
        return
    first_only = torch.full_like(batch["labels"], -100)
    first_only[:, 0] = 1
    loss = model(**{**batch, "labels": first_only})["loss"]
    assert bool(loss.isnan() or loss == 0) is conventions.shifts_labels


def test_conventions_see_through_wrappers() -> None:
    model = llama(layers=1, hidden=16)
    assert conventions_of(torch.compile(model, backend="eager")) == conventions_of(model) == CAUSAL
    assert conventions_of(nn.Linear(2, 2)) == PLAIN
