"""Into which parts a batch may be divided."""

import pytest
import torch

from silverspoon_kd.teacher.world.parts import doubled, num_parts, part_of

IDS, MASK = torch.arange(20).view(4, 5), torch.ones(4, 5)


def parts_of(inputs, wanted, main="input_ids"):
    number = num_parts(inputs, main, wanted)
    return [part_of(inputs, main, each, number) for each in range(number)]


@pytest.mark.parametrize(("wanted", "rows"), [(1, [4]), (2, [2, 2]), (3, [1, 1, 2]), (4, [1] * 4), (9, [1] * 4)])
def test_rows_are_divided_evenly_and_in_order(wanted, rows):
    parts = parts_of({"input_ids": IDS, "attention_mask": MASK}, wanted)
    assert sorted(len(part["input_ids"]) for part in parts) == rows
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), IDS)
    assert all(part["attention_mask"].shape == part["input_ids"].shape for part in parts)


def test_what_has_no_rows_is_in_every_part():
    shared = {
        "positions": torch.arange(5),
        "position_ids": torch.arange(5)[None],
        "table": torch.randn(5, 3),
        "scale": torch.tensor(2.0),
        "use_cache": False,
        "name": "a text",
        "nothing": None,
    }
    inputs = {"input_ids": IDS, "nested": {"mask": MASK, "pair": [MASK, MASK]}, "lengths": torch.arange(4), **shared}
    first, second = parts_of(inputs, 2)
    for part in (first, second):
        assert {name: part[name] for name in shared} == shared
    assert torch.equal(second["nested"]["mask"], MASK[2:])
    assert torch.equal(second["nested"]["pair"][1], MASK[2:])
    assert second["lengths"].tolist() == [2, 3]


@pytest.mark.parametrize(
    "unclear",
    [
        {"position_ids": torch.zeros(3, 4, 5)},  # rows come second
        {"position_ids": torch.zeros(4, 4, 5)},
        {"bias": torch.zeros(1, 4, 5)},
        {"names": ["one", "for", "each", "row"]},
        {"images": [torch.zeros(2, 2)] * 4},
    ],
)
def test_a_batch_whose_rows_are_not_clear_stays_whole(unclear):
    assert num_parts({"input_ids": IDS, **unclear}, "input_ids", 2) == 1
    assert doubled({"input_ids": IDS, **unclear}, "input_ids") is None


def test_positions_of_rows_as_long_as_the_batch_stay_whole():
    square = torch.arange(16).view(4, 4)
    assert num_parts({"input_ids": square, "positions": torch.arange(4)}, "input_ids", 2) == 1
    assert num_parts({"input_ids": square}, "input_ids", 2) == 2


@pytest.mark.parametrize("main", [None, "pixel_values"])
def test_without_the_main_input_every_tensor_must_have_the_rows(main):
    x = torch.zeros(4, 3)
    assert num_parts({"x": x, "y": x[:, 0], "one": x[:1]}, main, 2) == 2
    assert num_parts({"x": x, "table": torch.zeros(7, 3)}, main, 2) == 1
    assert num_parts({"table": torch.zeros(7, 3), "x": x}, main, 2) == 1
    assert num_parts({"text": "nothing"}, main, 2) == 1
    assert num_parts({"x": torch.zeros(0, 3)}, main, 2) == 1


def test_doubled():
    found = doubled({"input_ids": IDS, "positions": torch.arange(5), "flag": True}, "input_ids")
    assert torch.equal(found["input_ids"], torch.cat([IDS, IDS]))
    assert found["positions"].tolist() == list(range(5)) and found["flag"] is True
