"""Streams, events and the race check of the simulated device."""

import time

import pytest
import torch
from torch import nn

from support.tiny import qwen3

IDS = torch.arange(24).reshape(2, 12) % 64


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def wait_for_all(sim) -> None:
    for index in range(sim.device_count()):
        sim.synchronize(index)


def side_stream() -> torch.Stream:
    """A stream of sim:0 that comes after everything launched so far."""
    stream = torch.Stream(device="sim:0")
    stream.wait_stream(torch.accelerator.current_stream())
    return stream


# ---- time -----------------------------------------------------------------------------------------------------------


def test_a_stream_is_current_inside_its_with(async_sim):
    stream = torch.Stream(device="sim:0")
    before = torch.accelerator.current_stream()
    with stream:
        assert torch.accelerator.current_stream() == stream
    assert torch.accelerator.current_stream() == before == async_sim.default_stream(0)


def test_two_streams_work_at_the_same_time_and_one_does_not(async_sim):
    def run(streams):
        for stream in streams:
            with stream:
                async_sim.sleep_ms(600)
        launched = time.perf_counter()
        for stream in streams:
            stream.synchronize()
        return launched

    one, other = torch.Stream(device="sim:0"), torch.Stream(device="sim:0")
    assert seconds(lambda: run([one, one])) >= 1.2
    start = time.perf_counter()
    launched = run([one, other])
    assert launched - start < 0.5  # does not wait for any of them
    assert 0.6 <= time.perf_counter() - start < 1.1


def test_the_host_goes_on_until_it_needs_a_number(async_sim):
    torch.ones(3, device="sim:0").mul(2).sum().item()  # the first use of an operation looks up its shapes
    start = time.perf_counter()
    async_sim.sleep_ms(600)
    total = (torch.ones(3, device="sim:0") * 2).sum()
    assert time.perf_counter() - start < 0.5
    assert total.item() == 6.0
    assert time.perf_counter() - start >= 0.6


def test_events_tell_when_they_are_reached(async_sim):
    first, second = (torch.Event(device="sim", enable_timing=True) for _ in range(2))
    first.record()
    async_sim.sleep_ms(100)
    second.record()
    assert not second.query()
    second.synchronize()
    assert second.query()
    assert 95 < first.elapsed_time(second) < 300


def test_a_stream_waits_for_an_event_of_another(async_sim):
    first, second, event = torch.Stream(device="sim:0"), torch.Stream(device="sim:1"), torch.Event(device="sim")
    with first:
        async_sim.sleep_ms(150)
        event.record(first)
    second.wait_event(event)
    assert seconds(second.synchronize) > 0.1
    assert event.query()


def test_results_are_wrong_without_a_wait(async_sim):
    source = torch.ones(4, device="sim:0")
    async_sim.synchronize(0)
    with side_stream():
        async_sim.sleep_ms(100)
        source.fill_(3)
    early = (source + 1).tolist()
    async_sim.synchronize(0)
    assert early == [2.0] * 4
    assert (source + 1).tolist() == [4.0] * 4


def test_a_pinned_buffer_is_stale_until_the_copy_is_waited_for(async_sim):
    source, buffer = torch.ones(4, device="sim:0"), torch.zeros(4).pin_memory()
    async_sim.sleep_ms(100)
    source.mul_(7)
    buffer.copy_(source, non_blocking=True)
    assert buffer.tolist() == [0.0] * 4
    async_sim.synchronize(0)
    assert buffer.tolist() == [7.0] * 4


def test_errors_of_a_stream_are_raised_where_it_is_waited_for(async_sim):
    out_of_range = torch.tensor([7], device="sim:0")
    async_sim.sleep_ms(50)
    torch.ones(3, device="sim:0").index_select(0, out_of_range)
    with pytest.raises((RuntimeError, IndexError), match="out of range"):
        async_sim.synchronize(0)
    async_sim.synchronize(0)


def test_launching_a_forward_never_waits(async_sim):
    model, ids = qwen3(7).eval().to("sim:1"), IDS.to("sim:1")
    with torch.no_grad():
        model(ids)
        async_sim.synchronize(1)
        async_sim.sync_ops()
        model(ids)
    assert async_sim.sync_ops() == {}


def test_teacher_and_student_on_two_devices_overlap(async_sim):
    teacher, student = qwen3(7).eval().to("sim:1"), qwen3(0).to("sim:0")
    here, there = IDS.to("sim:0"), IDS.to("sim:1")

    def step(overlapped: bool) -> float:
        with torch.no_grad():
            target = teacher(there).logits
        if not overlapped:
            async_sim.synchronize(1)
        loss = (student(here).logits - target.to("sim:0", non_blocking=True)).pow(2).mean()
        return loss.item()

    expected = step(False)
    async_sim.set_op_delay_us(2000)
    assert step(True) == expected
    sequential, overlapped = seconds(lambda: step(False)), seconds(lambda: step(True))
    assert overlapped < 0.8 * sequential
    async_sim.set_op_delay_us(0)
    async_sim.set_race_check(1)
    step(True)
    assert async_sim.races() == []


# ---- races ----------------------------------------------------------------------------------------------------------


def test_reads_and_writes_without_a_wait_are_reported(sim):
    sim.set_race_check(1)
    source, stream = torch.ones(4, device="sim:0"), torch.Stream(device="sim:0")
    with stream:
        result = source * 3
    _ = result + 1
    found = sim.races()
    assert len(found) == 2
    assert "mul" in found[0] and "reads data written on sim:0/stream0 without waiting" in found[0]
    assert "add" in found[1] and f"reads data written on sim:0/stream{stream.stream_id} without waiting" in found[1]
    with stream:
        source.zero_()
    assert any("overwrites data" in text for text in sim.races())


def test_overwriting_what_another_stream_still_reads_is_reported(sim):
    sim.set_race_check(1)
    source = torch.ones(4, device="sim:0")
    with side_stream():
        _ = source * 3
    source.zero_()
    assert ["overwrites data still read on" in text for text in sim.races()] == [True]


@pytest.mark.parametrize("how", ["stream", "event", "host", "host-event", "device"])
def test_every_kind_of_wait_makes_an_order(sim, how):
    sim.set_race_check(2)
    source = torch.ones(4, device="sim:0")
    stream, current, event = side_stream(), torch.accelerator.current_stream(), torch.Event(device="sim")
    with stream:
        result = source * 3
        event.record(stream)
    if how == "stream":
        current.wait_stream(stream)
    elif how == "event":
        current.wait_event(event)
    elif how == "host":
        stream.synchronize()
    elif how == "host-event":
        event.synchronize()
    else:
        torch.accelerator.synchronize(0)
    assert (result + 1).tolist() == [4.0] * 4
    source.zero_()
    assert sim.races() == []


def test_an_event_covers_only_what_came_before_it(sim):
    sim.set_race_check(1)
    source, stream, event = torch.ones(4, device="sim:0"), side_stream(), torch.Event(device="sim")
    with stream:
        early = source * 3
        event.record(stream)
        late = source * 4
    torch.accelerator.current_stream().wait_event(event)
    _ = early + 1
    assert sim.races() == []
    _ = late + 1
    assert len(sim.races()) == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_freed_while_in_use_needs_record_stream(sim, recorded):
    sim.set_race_check(1)
    source, stream = torch.ones(1000, device="sim:0"), side_stream()
    with stream:
        result = source * 2
    if recorded:
        source.record_stream(stream)
    del source
    torch.empty(1000, device="sim:0")  # could get the same memory
    found = sim.races()
    assert len(found) == (0 if recorded else 1)
    assert recorded or "missing record_stream" in found[0]
    del result


def test_memory_that_is_freed_and_waited_for_before_its_reuse_is_fine(sim):
    sim.set_race_check(2)
    source, stream = torch.ones(1000, device="sim:0"), side_stream()
    with stream:
        result = source * 2
    del source
    torch.accelerator.current_stream().wait_stream(stream)
    torch.empty(1000, device="sim:0")
    assert result.sum().item() == 2000


def test_raises_at_the_operation(sim):
    sim.set_race_check(2)
    with torch.Stream(device="sim:0"):
        there = torch.ones(3, device="sim:0")
    with pytest.raises(RuntimeError, match=r"sim race: .*add.* reads data written on sim:0/stream\d+ without waiting"):
        there + 1


def test_a_prefetched_copy_from_another_device_has_to_be_waited_for(sim):
    sim.set_race_check(1)
    there, stream = torch.ones(4, device="sim:1"), torch.Stream(device="sim:0")
    with stream:
        copied = there.to("sim:0")
    _ = copied + 1
    assert ["reads data written on sim:1/stream0" in text for text in sim.races()] == [True]
    torch.accelerator.current_stream(torch.device("sim:0")).wait_stream(stream)
    _ = copied + 1
    assert sim.races() == []


def test_autograd_orders_a_forward_on_a_side_stream(sim):
    sim.set_race_check(2)
    layer, inputs = nn.Linear(8, 8).to("sim:0"), torch.randn(2, 8, device="sim:0")
    stream = side_stream()
    with stream:
        output = layer(inputs).sum()
    torch.accelerator.current_stream().wait_stream(stream)
    output.backward()
    assert layer.weight.grad.sum().isfinite().item()
    assert sim.races() == []
