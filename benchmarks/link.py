"""What it costs to bring a teacher's activations to a student: ``python benchmarks/link.py``.

A teacher of the size of SmolLM2-135M runs a forward on 4 x 256 tokens in this process. Then twelve of its activations,
4 x 256 x 576 in float32 each, cross to another process, as for twelve holistic alignments. Printed is the time until
the last one has arrived, and the processor time of both sides, as shares of the forward's time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers import LlamaConfig, LlamaModel

from silverspoon_kd.capture import Capture, Tap, Trace
from silverspoon_kd.teacher.world.link import Link

ROWS, LENGTH, HIDDEN, NUM_LAYERS, NUM_ALIGNMENTS = 4, 256, 576, 30, 12
NBYTES = ROWS * LENGTH * HIDDEN * 4 * NUM_ALIGNMENTS


def forward_seconds(repeats: int) -> float:
    """The median time of a forward that gives the activations of the aligned layers."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
    )
    model = LlamaModel(config).eval()
    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
    taps = [Tap(f"layers.{number * NUM_LAYERS // NUM_ALIGNMENTS + 1}") for number in range(NUM_ALIGNMENTS)]
    trace, seconds = Trace(), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        with torch.no_grad():
            Capture(model, taps, trace).run(lambda: model(input_ids=ids, use_cache=False), may_stop=True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def receive(port: int, repeats: int) -> None:
    """The student's side: take everything, say so, and at the end tell the processor time."""
    link = Link(TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60)), 0, 2, 60, 60)
    used = 0.0
    for _ in range(repeats):
        before = time.process_time()
        for _ in range(NUM_ALIGNMENTS):
            link.receive(1)
        used += time.process_time() - before
        link.send(1, {})
    link.send(1, {"used": used / repeats})
    link.receive(1)  # it has arrived


def link_seconds(repeats: int) -> tuple[float, float]:
    """The median time in which the activations cross, and the processor time of both sides."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    command = [sys.executable, __file__, "--receive", str(store.port), "--repeats", str(repeats)]
    with subprocess.Popen(command) as student:
        link = Link(store, 1, 2, 60, 60)
        values = [torch.randn(ROWS, LENGTH, HIDDEN) for _ in range(NUM_ALIGNMENTS)]
        seconds, used = [], 0.0
        for _ in range(repeats):
            start, before = time.perf_counter(), time.process_time()
            for number, value in enumerate(values):
                link.send(0, {"id": 1, "tap": number}, [value])
            link.receive(0)
            seconds.append(time.perf_counter() - start)
            used += time.process_time() - before
        used = used / repeats + link.receive(0).content["used"]
        link.send(0, {})
        student.wait()
    return statistics.median(seconds), used


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--receive", type=int, help="the port of the store, in the process that receives")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receive:
        receive(options.receive, options.repeats)
        return
    forward, (crossing, used) = forward_seconds(5), link_seconds(options.repeats)
    numbers = {
        "megabytes": NBYTES / 1e6,
        "forward_s": forward,
        "crossing_s": crossing,
        "processor_s": used,
        "crossing/forward": crossing / forward,
        "processor/forward": used / forward,
    }
    print(json.dumps({name: round(value, 5) for name, value in numbers.items()}, indent=1))


if __name__ == "__main__":
    main()
