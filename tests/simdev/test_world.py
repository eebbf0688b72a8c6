"""A dedicated teacher on simulated devices: they work at the same time, and nobody waits for a copy."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from silverspoon_kd.capture import Capture, Tap, Trace, select_logits
from silverspoon_kd.teacher.world.link import Link
from support.more_models import gpt2
from support.near_world import near_world
from support.tiny import llama, qwen3

# Asynchronous, as accelerators are; both modes of the device itself: test_simdev.py, test_streams.py.
pytestmark = pytest.mark.parametrize("sim", ["async"], indirect=True)

LAYERS = [Tap(f"model.layers.{number}") for number in range(4)]
LOGITS = Tap("", "output", select_logits)
MASK = (torch.arange(12) < torch.tensor([12, 7, 9, 3])[:, None]).long()
BATCH = {"input_ids": (torch.arange(48).view(4, 12) % 63 + 1) * MASK, "attention_mask": MASK}
RACES = 2


def part(rows: int) -> dict[str, torch.Tensor]:
    return {name: value[:rows] for name, value in BATCH.items()}


def take_all(run, taps, sim) -> dict[Tap, torch.Tensor]:
    """Take everything, as it arrives on the student's device."""
    values = {tap: run.take(tap) for tap in taps}
    assert {str(value.device) for value in values.values()} == {"sim:0"}
    found = {tap: value.cpu() for tap, value in values.items()}
    run.close()
    return found


def expected_of(model, taps, batch):
    capture = Capture(model.eval(), taps, Trace())
    with torch.no_grad():
        capture.run(lambda: model(**batch), may_stop=False)
    return capture.values


@pytest.mark.parametrize(
    ("make", "taps", "devices"),
    [
        (lambda: qwen3(3), LAYERS, (1, 2, 3)),
        (lambda: llama(3), [*LAYERS, LOGITS], (1, 2)),
        (lambda: qwen3(3, tie_word_embeddings=True), [*LAYERS, LOGITS], (1, 2)),
        (
            lambda: gpt2(3, n_layer=4, vocab_size=64),
            [Tap("transformer.h.1", "output", 0), Tap("transformer.wpe")],
            (1, 2),
        ),
    ],
    ids=["qwen3", "logits", "tied", "no-rows"],
)
def test_micro_batches_on_several_devices_give_the_same(sim, make, taps, devices):
    sim.set_race_check(RACES)
    spec = {"device_type": "sim", "devices": devices, "micro_batches": len(devices)}
    with near_world(make(), taps, "sim:0", **spec) as executor:
        batches = [BATCH, part(1), part(2)]
        runs = [executor.start(batch) for batch in batches]
        for run, batch in zip(runs, batches, strict=True):
            found, expected = take_all(run, taps, sim), expected_of(make(), taps, batch)
            for tap in taps:
                torch.testing.assert_close(found[tap], expected[tap], atol=1e-6, rtol=1e-5)
    assert sim.races() == []


def seconds(executor, batch, taps, sim) -> float:
    start = time.perf_counter()
    take_all(executor.start(batch), taps, sim)
    return time.perf_counter() - start


@pytest.mark.parametrize("taps", [LAYERS, [*LAYERS, LOGITS]], ids=["layers", "logits"])
def test_two_devices_work_at_the_same_time(sim, taps):
    """Four parts of one row take 5/8 of what they take one after the other, if the layers are divided evenly."""
    spec = {"device_type": "sim", "devices": (1, 2), "micro_batches": 4}
    with near_world(qwen3(3), taps, "sim:0", **spec) as executor:
        seconds(executor, BATCH, taps, sim)  # the first use of an operation looks up its shapes
        sim.set_op_delay_us(2000)
        one = seconds(executor, part(1), taps, sim)
        four = seconds(executor, BATCH, taps, sim)
        print(f"one row {one:.2f} s, four rows in four parts {four:.2f} s, ratio {four / (4 * one):.2f}")
        sim.set_op_delay_us(0)
        sim.set_race_check(RACES)
        seconds(executor, BATCH, taps, sim)
    assert four < 0.8 * 4 * one
    assert sim.races() == []


def test_requests_follow_each_other_without_a_gap(sim):
    """The first device begins with the next request while the second works on this one."""
    spec = {"device_type": "sim", "devices": (1, 2), "micro_batches": 1}
    with near_world(qwen3(3), LAYERS, "sim:0", **spec) as executor:
        seconds(executor, BATCH, LAYERS, sim)
        sim.set_op_delay_us(2000)
        one = seconds(executor, BATCH, LAYERS, sim)
        start = time.perf_counter()
        runs = [executor.start(BATCH) for _ in range(4)]
        for run in runs:
            take_all(run, LAYERS, sim)
        four = time.perf_counter() - start
        print(f"one request {one:.2f} s, four {four:.2f} s, ratio {four / (4 * one):.2f}")
    assert four < 0.8 * 4 * one


def joined() -> tuple[Link, Link]:
    store, found = dist.HashStore(), {}

    def join(rank):
        found[rank] = Link(store, rank, 2, 30, 30, pinned=True)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found[0], found[1]


def test_sending_waits_for_nothing_and_sends_what_was_there(sim):
    sim.set_race_check(RACES)
    teacher, student = joined()
    value = torch.arange(6.0, device="sim:1").view(2, 3)
    teacher.send(1, {"id": 0}, [value])
    assert student.receive(0).tensors[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    sim.sync_ops()
    start = time.perf_counter()
    with sim.device(1):
        sim.sleep_ms(600)
    made = value * 2
    teacher.send(1, {"id": 1}, [made, value.t(), torch.ones(2)])
    teacher.send(1, {"id": 2}, [torch.ones(1)])  # does not overtake
    assert time.perf_counter() - start < 0.5
    assert sim.sync_ops() == {}
    del made
    torch.zeros(2, 3, device="sim:1")  # could get the same memory
    message = student.receive(0)
    assert time.perf_counter() - start >= 0.6
    assert [each.tolist() for each in message.tensors] == [[[0, 2, 4], [6, 8, 10]], [[0, 3], [1, 4], [2, 5]], [1, 1]]
    assert all(each.is_pinned() for each in message.tensors)
    assert student.receive(0).content == {"id": 2}
    assert sim.races() == []
    teacher.close()


def test_the_teachers_stream_does_not_wait_for_the_copy(sim):
    """Copies go on a stream of their own: work that follows on the teacher's begins at once."""
    teacher, student = joined()
    value = torch.ones(4, device="sim:1")
    teacher.send(1, {}, [value])
    student.receive(0)
    sim.synchronize(1)
    with teacher._streams[value.device]:
        sim.sleep_ms(600)
    teacher.send(1, {}, [value])
    start = time.perf_counter()
    assert (value + 1).tolist() == [2.0] * 4
    assert time.perf_counter() - start < 0.4
    student.receive(0)
    assert time.perf_counter() - start >= 0.4
    teacher.close()


def test_work_that_fails_on_the_device_is_told_in_place_of_its_result(sim, monkeypatch):
    teacher, student = joined()
    monkeypatch.setattr(teacher, "_copy_out", lambda tensor, target: FailedEvent())
    teacher.send(1, {"id": 5}, [torch.ones(3, device="sim:1")], failed=lambda error: {"id": 5, "error": str(error)})
    message = student.receive(0)
    assert message.content == {"id": 5, "error": "device-side assert"} and message.tensors == []
    teacher.close()


class FailedEvent:
    def synchronize(self):
        raise RuntimeError("device-side assert")
