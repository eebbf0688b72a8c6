"""Show on one GPU that the numbers are right: ``make gpu-check``, or ``python benchmarks/gpu_check.py``.

Needs a checkout, torch, transformers, accelerate, safetensors and cloudpickle, no network and no installation of this
package. Every group of checks runs in processes of its own; a table at the end says what was found. The exit code is 0
if every number is right, 1 if one is not, and 2 without an accelerator. ``--device cpu`` runs the same checks on the
CPU.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PATHS = [str(path) for path in (_HERE, _HERE.parent / "src", _HERE.parent / "tests")]
sys.path[:0] = _PATHS

from gpu_checks.rows import BAD, Row, Setting, read_rows, run_checks, table  # noqa: E402

# Seconds; the whole takes less, also where starting a process is slow.
LIMIT = 470.0
# Each with the number of ranks that torchrun starts; 0: one process without it. The most telling ones come first.
GROUPS = {"parity": 0, "ranks": 1, "dedicated": 0, "speed": 0}


def main() -> int:
    """Run the checks and print the table."""
    options = _options()
    if options.group:
        return _run_group(options)
    device = options.device or _accelerator()
    if device is None:
        return _refuse()
    print(_versions(device), flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:

        def run(group: str) -> list[Row]:
            found = _group(group, device, options.quick, Path(scratch), LIMIT - (time.monotonic() - start))
            print(f"{group}: done after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            return found

        # One after the other where times and memory are measured in earnest.
        with ThreadPoolExecutor(2 if options.quick else 1) as pool:
            rows = [row for found in pool.map(run, options.groups) for row in found]
    print(table(rows))
    counts = ", ".join(
        f"{sum(row.status == status for row in rows)} {status}" for status in ("ok", "skipped", "WRONG", "FAILED")
    )
    print(f"\n{counts} on {device} in {time.monotonic() - start:.0f} s")
    return 1 if any(row.status in BAD for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="torch's name of a device type; default: the accelerator of this machine")
    parser.add_argument("--quick", action="store_true", help="a few checks of each kind")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: all")
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _accelerator() -> str | None:
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def _refuse() -> int:
    import torch

    print(
        f"make gpu-check needs an accelerator, and torch {torch.__version__} finds none here: run it on a machine with "
        "a GPU and a build of torch for it, or run the same checks on the CPU with 'make gpu-check DEVICE=cpu'.",
        file=sys.stderr,
    )
    return 2


def _versions(device: str) -> str:
    import accelerate
    import torch
    import transformers

    name = "the CPU" if device == "cpu" else torch.get_device_module(device).get_device_name()
    versions = [f"{module.__name__} {module.__version__}" for module in (torch, transformers, accelerate)]
    return f"{name}, Python {sys.version.split()[0]}, {', '.join(versions)}"


def _group(group: str, device: str, quick: bool, scratch: Path, seconds: float) -> list[Row]:
    """Run a group in its own processes and return its rows; a group that does not get to its end is a row too."""
    command = [str(Path(__file__).resolve()), "--group", group, "--device", device, "--scratch", str(scratch)]
    if GROUPS[group]:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={GROUPS[group]}", *command]
    log = scratch / f"{group}.log"
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command, *(["--quick"] if quick else [])],
            env=_environment(device),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            ended = f"ended with exit code {process.wait(max(seconds, 1))}"
        except subprocess.TimeoutExpired:
            # Its own children end when it does: the teacher's processes see their pipe close, torchrun ends its ranks.
            process.terminate()
            process.wait(30)
            ended = f"did not end within {seconds:.0f} s"
    rows = read_rows(_written(scratch, group))
    if process.returncode != 0:
        rows.append(Row(f"group {group}", "FAILED", note=f"it {ended}", seconds=time.monotonic() - start))
    if any(row.status in BAD for row in rows):
        print(f"---- end of the output of {group} ----\n{log.read_text()[-4000:]}", file=sys.stderr)
    return rows


def _environment(device: str) -> Mapping[str, str]:
    """No network, and this checkout for the processes that the checks start."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    path = os.pathsep.join([*_PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **offline, **threads, "PYTHONPATH": path}


def _run_group(options: argparse.Namespace) -> int:
    import transformers

    transformers.logging.set_verbosity_error()
    folder = options.scratch / options.group
    setting = Setting(options.device, options.quick, folder)
    checks = import_module(f"gpu_checks.{options.group}").checks(setting)
    run_checks(checks, _written(options.scratch, options.group))
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def _written(scratch: Path, group: str) -> Path:
    return scratch / f"{group}.jsonl"


if __name__ == "__main__":
    sys.exit(main())
