"""A teacher that cuts its requests gives what it gives in one piece."""

import pytest
import torch
from torch import nn

from silverspoon_kd.capture import Capture, InputView, Tap, Trace, select_logits
from support.more_models import bert, gpt2
from support.near_world import near_world
from support.tiny import qwen3

LAYERS = [Tap(f"model.layers.{number}", side) for number in range(4) for side in ("input", "output")]
LOGITS = Tap("", "output", select_logits)


def ragged(rows: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded to 12; the last is all padding."""
    lengths = [12, 7, 9, 3, 11, 5][:rows]
    lengths[-1] = 0 if rows > 1 else lengths[-1]
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": (torch.arange(rows * 12).view(rows, 12) % 63 + 1) * mask, "attention_mask": mask}


class Odd(nn.Module):
    """Takes things that are no rows, and gives such."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.table = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x, positions, scale, name, flag=False):
        assert name == "a text"
        return {"logits": self.inner(x["in"]) * scale + self.table(positions)[None]}


def odd_batch(rows: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 5, 6, generator=generator)
    return {"x": {"in": x}, "positions": torch.randn(1, 6, generator=generator), "scale": torch.tensor(2.0),
            "name": "a text", "flag": True}  # fmt: skip


def expected_of(teacher, taps, inputs):
    capture = Capture(teacher.eval(), taps, Trace())
    with torch.no_grad():
        capture.run(lambda: teacher(**InputView(teacher, "teacher")(inputs)), may_stop=False)
    return capture.values


def check(teacher, taps, batches, wanted, num_parts, tolerance=1e-6, **spec):
    """Ask for all batches at once and compare; return in how many parts each came."""
    expected = [expected_of(teacher, taps, batch) for batch in batches]
    with near_world(teacher, taps, micro_batches=wanted, **spec) as executor:
        runs = [executor.start(batch) for batch in batches]
        for run, values in zip(runs, expected, strict=True):
            for tap in taps:
                torch.testing.assert_close(run.take(tap), values[tap], atol=tolerance, rtol=tolerance and 1e-5)
        assert [sum(run._num_parts.values()) for run in runs] == num_parts
        for run in runs:
            run.close()


def test_ragged_rows_and_batches_smaller_than_the_parts():
    check(qwen3(0), [*LAYERS, LOGITS], [ragged(rows) for rows in (4, 5, 2, 1)], 3, [3, 3, 2, 1])


def test_in_one_piece_nothing_changes_by_a_bit():
    check(qwen3(0), LAYERS, [ragged(4)], 1, [1], tolerance=0)


@pytest.mark.parametrize("padded", [True, False])
def test_attention_maps_and_pooled_outputs(padded):
    teacher = bert(0, attn_implementation="eager")
    taps = [Tap("encoder.layer.1.attention.self", "output", 1), Tap("pooler"), Tap("encoder.layer.0")]
    batch = ragged(4) if padded else {"input_ids": ragged(4)["input_ids"].clamp(1, 49)}
    batch["input_ids"] = batch["input_ids"].clamp(0, 49)
    check(teacher, taps, [batch], 2, [2])


def test_values_without_rows_are_not_cut():
    teacher = gpt2(0)
    batch = {"input_ids": ragged(4)["input_ids"] % 50, "attention_mask": ragged(4)["attention_mask"]}
    check(teacher, [Tap("transformer.h.0", "output", 0)], [batch], 2, [2])
    check(teacher, [Tap("transformer.h.0", "output", 0), Tap("transformer.wpe")], [batch], 2, [1])


def test_inputs_without_rows():
    check(Odd(), [Tap("inner"), LOGITS], [odd_batch(4), odd_batch(1)], 2, [2, 1], example=odd_batch(3))
    # A table of the positions, or of something else, that is not there for each row.
    check(Odd(), [Tap("inner"), Tap("table")], [odd_batch(4)], 2, [1], example=odd_batch(3))
    batch = {**odd_batch(4), "positions": torch.randn(5, 6)}
    check(Odd(), [Tap("inner"), LOGITS], [batch], 2, [1], example=odd_batch(3))


def test_the_same_tensor_under_two_names_crosses_once():
    with near_world(qwen3(0), LAYERS, micro_batches=2) as executor:
        run = executor.start(ragged(4))
        assert run.take(Tap("model.layers.1", "input")) is run.take(Tap("model.layers.0"))
        for tap in LAYERS:
            run.take(tap)
        costs = run.costs()
    assert costs["teacher_bytes"] == 5 * 4 * 12 * 32 * 4  # of eight names
    assert 0 < costs["teacher_wait"] < 60


def test_an_error_in_a_later_part_arrives_and_the_next_request_is_answered(monkeypatch):
    tap = Tap("model.layers.0")
    with near_world(qwen3(0), [Tap("model.layers.0", "input"), tap], micro_batches=2) as executor:
        mlp, calls = executor._world.server._teacher.model.layers[0].mlp, []
        forward = mlp.forward

        def fails_at_second(*args):
            calls.append(args)
            if len(calls) == 2:
                raise LookupError("no such word")
            return forward(*args)

        monkeypatch.setattr(mlp, "forward", fails_at_second)
        first, second = executor.start(ragged(4)), executor.start(ragged(2))
        with pytest.raises(LookupError, match=r"no such word \(In the teacher's forward; its batch was .*\[4, 12\]"):
            first.take(tap)
        expected = expected_of(qwen3(0), [tap], ragged(2))
        torch.testing.assert_close(second.take(tap), expected[tap], atol=1e-6, rtol=1e-5)
