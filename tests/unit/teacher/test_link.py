"""The wire, with both ends in this process."""

import threading
import time
import weakref

import numpy
import pytest
import torch
import torch.distributed as dist

from silverspoon_kd.errors import TeacherError
from silverspoon_kd.teacher.world.inbox import Inbox
from silverspoon_kd.teacher.world.link import DTYPES, Link


@pytest.fixture
def ends():
    """The two ends of a link."""
    store, found = dist.HashStore(), {}

    def join(rank):
        found[rank] = Link(store, rank, 2, 30, 30)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found[0], found[1]


def cross(ends, content, tensors=()):
    ends[0].send(1, content, tensors)
    return ends[1].receive(0)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_shape_arrives_as_it_was(ends, name):
    values = torch.arange(24).to(DTYPES[name])
    strided = values.view(4, 6)[:, ::2]
    sent = [values.view(2, 3, 4), strided, strided.t(), values[:0].view(0, 3), values[5], values[:1]]
    for tensors in (sent, [sent[0]], [sent[1]], [sent[3]], [sent[4]], []):
        message = cross(ends, {"id": 7}, tensors)
        assert message.content == {"id": 7} and message.source == 0
        assert len(message.tensors) == len(tensors)
        for found, expected in zip(message.tensors, tensors, strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


@pytest.mark.parametrize("length", [900, 1000, 1024, 5000])
@pytest.mark.parametrize("tensors", [[], [torch.arange(3), torch.ones(2)]], ids=["alone", "with-tensors"])
def test_long_texts(ends, length, tensors):
    message = cross(ends, {"error": "é" * (length // 2)}, tensors)
    assert message.content == {"error": "é" * (length // 2)}
    assert [each.tolist() for each in message.tensors] == [each.tolist() for each in tensors]


def test_messages_keep_their_order_and_their_values_from_anybody(ends):
    for number in range(20):
        ends[0].send(1, {"id": number}, [torch.full((1000,), number)])
    for number in range(20):
        message = ends[1].receive()
        assert message.content == {"id": number} and message.source == 0
        assert message.tensors[0].eq(number).all()


def test_a_dtype_that_cannot_be_sent_is_an_error(ends):
    with pytest.raises(TeacherError, match="complex64 cannot be sent"):
        ends[0].send(1, {}, [torch.zeros(1, dtype=torch.complex64)])


def test_answers_are_received_while_nobody_waits_and_old_ones_are_dropped(ends):
    inbox = Inbox(ends[1], num_taps=2)
    ends[0].send(1, {"id": 1, "error": "one"})
    ends[0].send(1, {"id": 1, "tap": 1, "part": 0, "parts": 1})  # was under way already
    ends[0].send(1, {"id": 2, "tap": 0, "part": 0, "parts": 1})
    ends[0].send(1, {"id": 2, "tap": 1, "part": 0, "parts": 1})
    first, second = inbox.expect(1, [0]), inbox.expect(2, [0])
    assert first.get(timeout=10).content["error"] == "one"
    assert [second.get(timeout=10).content["tap"] for _ in range(2)] == [0, 1]
    assert first.empty() and second.empty()
    inbox.close()


def test_what_was_taken_is_not_kept(ends):
    memory = [numpy.ones(10) for _ in range(5)]
    kept = [weakref.ref(each) for each in memory]
    for each in memory:
        ends[0].send(1, {}, [torch.from_numpy(each)])
    del memory, each
    assert kept[-1]() is not None
    for _ in kept:
        ends[1].receive(0)
    deadline = time.monotonic() + 10
    while any(each() is not None for each in kept) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [each() for each in kept] == [None] * 5
