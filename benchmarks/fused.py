"""What a loss on logits costs when it never makes them: ``python benchmarks/fused.py``.

The final hidden states of a student (256) and a teacher (512) and their two heads give a divergence and its gradients
by the student's hidden states and head. ``fused`` forms the gradient chunk by chunk. It is compared with two ways of
trl (``pip install 'silverspoon-kd[bench]'``): the loss of its GKDTrainer on all logits, and its divergence from hidden
states in tiles; where trl is missing with ``dense``, the loss of the same name on all logits. One process compares
values and gradients of all ways first. Then every way runs in a process of its own on one thread, one after the other
in each of several rounds; the figures are medians over the rounds.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
sys.path.insert(0, str(_HERE.parent.parent / "src"))

COMPARED = ("TRL GKD", "TRL chunked") if importlib.util.find_spec("trl") else ("dense",)
WAYS = ("fused", *COMPARED)
LOSSES = {"kl_divergence": {}, "jsd": {"beta": 0.5}}
# What trl calls them.
BETAS = {"kl_divergence": 0.0, "jsd": 0.5}
TOKENS, STUDENT_WIDTH, TEACHER_WIDTH, TIMED = 1024, 256, 512, 1


def main() -> None:
    """Run all rounds and print the table, or (with --way) one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[65536, 151936])
    parser.add_argument("--loss", choices=LOSSES, nargs="+", default=list(LOSSES))
    parser.add_argument("--chunk-mib", type=int, default=0, help="0 for the default")
    parser.add_argument("--way", choices=[*WAYS, "check"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way == "check":
        _check(options.loss[0], options.vocabulary[0], options.chunk_mib)
    elif options.way:
        print(json.dumps(_measure(options.way, options.loss[0], options.vocabulary[0], options.chunk_mib)))
    else:
        for vocabulary, loss in itertools.product(options.vocabulary, options.loss):
            _compare(loss, vocabulary, options)


def _compare(loss: str, vocabulary: int, options: argparse.Namespace) -> None:
    def start(way: str) -> str:
        command = [sys.executable, str(_HERE), "--way", way, "--loss", loss]
        command += ["--vocabulary", str(vocabulary), "--chunk-mib", str(options.chunk_mib)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        return subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout

    print(f"\n{loss}, {TOKENS} tokens, vocabulary {vocabulary}, float32: {start('check').strip()}")
    found: dict[str, list[dict]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            found[way].append(json.loads(start(way).splitlines()[-1]))
    median = {way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in found.items()}
    print(f"{'way':<12}{'CPU s':>8}{'peak MiB':>10}{'fused / way, CPU':>18}{'fused / way, memory':>21}")
    for way, row in median.items():
        cpu, memory = median["fused"]["cpu"] / row["cpu"], median["fused"]["peak"] / row["peak"]
        print(f"{way:<12}{row['cpu']:>8.2f}{row['peak']:>10.0f}{cpu:>18.2f}{memory:>21.2f}", flush=True)


def _measure(way: str, loss: str, vocabulary: int, chunk_mib: int) -> dict[str, float]:
    """Return CPU seconds of one forward and backward, and MiB of memory above what the inputs and torch take."""
    step = _steps([way], loss, vocabulary, chunk_mib)[way]
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    seconds = []
    for _ in range(1 + TIMED):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"cpu": min(seconds[1:]), "peak": peak / 2**20}


def _check(loss: str, vocabulary: int, chunk_mib: int) -> None:
    ways = _steps(WAYS, loss, vocabulary, chunk_mib)
    fused = ways["fused"]()
    worst = 0.0
    for way in COMPARED:
        for ours, theirs in zip(fused, ways[way](), strict=True):
            worst = max(worst, ((ours - theirs).norm() / theirs.norm()).item())
    assert worst <= 1e-5, f"the ways differ in their numbers by {worst:.1e}"
    print(f"values and gradients agree to {worst:.0e}")


def _steps(ways: Sequence[str], loss_name: str, vocabulary: int, chunk_mib: int) -> dict[str, Callable[[], tuple]]:
    import torch

    from silverspoon_kd.losses import OutputHead, fused_divergence, get_loss_function

    torch.manual_seed(0)
    torch.set_num_threads(1)
    hidden = torch.randn(TOKENS, STUDENT_WIDTH, requires_grad=True)
    weight = torch.randn(vocabulary, STUDENT_WIDTH).mul_(2 / math.sqrt(STUDENT_WIDTH)).requires_grad_()
    teacher = torch.randn(TOKENS, TEACHER_WIDTH)
    teacher_weight = torch.randn(vocabulary, TEACHER_WIDTH).mul_(2 / math.sqrt(TEACHER_WIDTH))
    loss = get_loss_function(loss_name, **LOSSES[loss_name])
    heads, limit = (OutputHead(weight), OutputHead(teacher_weight)), {}
    if chunk_mib:
        limit = {"chunk_bytes": chunk_mib * 2**20}

    def step(value: Callable[[], torch.Tensor]) -> tuple:
        total = value()
        return total.detach(), *torch.autograd.grad(total, (hidden, weight))

    values = {
        "fused": lambda: fused_divergence(loss, hidden, heads[0], teacher, heads[1], **limit).total,
        "dense": lambda: loss.sum_and_count(hidden @ weight.T, teacher @ teacher_weight.T).total,
    }
    if any(way.startswith("TRL") for way in ways):
        values |= _trl(BETAS[loss_name], (hidden, weight), (teacher, teacher_weight))
    return {way: partial(step, values[way]) for way in ways}


def _trl(beta: float, student: tuple, teacher: tuple) -> dict[str, Callable[[], Any]]:
    from trl.experimental.gkd import GKDTrainer
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def logits(hidden, weight):
        return hidden @ weight.T

    return {
        "TRL GKD": lambda: GKDTrainer.generalized_jsd_loss(
            logits(*student), logits(*teacher), beta=beta, reduction="sum"
        ),
        "TRL chunked": lambda: ChunkedDivergenceFunction.apply(*student, None, *teacher, None, beta)[0].sum(),
    }


if __name__ == "__main__":
    main()
