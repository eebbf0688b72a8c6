"""Measure what this machine can and write it to results.md: ``python benchmarks/bench.py [NAME ...]``.

Names choose some of the scripts beside this one; what results.md has of the others stays.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.md"
SCRIPTS = ("response", "fused", "lean", "overlap", "link", "growth", "gkd")
HEAD = """# Results

Written by `make bench`; do not edit. Ratios between ways that were measured one after the other in each of several
rounds, each way in a process of its own, after the ways were seen to give the same numbers. Times in seconds mean
nothing for another machine. What each script does stands at its head.
"""


def main() -> None:
    """Run the scripts, show what they print, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(SCRIPTS)}; default: all")
    names = parser.parse_args().name or SCRIPTS
    if unknown := set(names) - set(SCRIPTS):
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(SCRIPTS)}.")
    sections = _sections()
    for name in names:
        sections[name] = f"{_circumstances()}\n\n```text\n{_run(name)}\n```{_aside(name)}"
        ordered = [f"## {each}\n\n{sections[each]}" for each in SCRIPTS if each in sections]
        RESULTS.write_text("\n\n".join([HEAD.strip(), *ordered]) + "\n")


def _sections() -> dict[str, str]:
    text = RESULTS.read_text() if RESULTS.exists() else ""
    parts = re.split(r"^## (\w+)\n", text, flags=re.MULTILINE)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _run(name: str) -> str:
    command = [sys.executable, str(HERE / f"{name}.py")]
    print(f"\n$ python benchmarks/{name}.py", flush=True)
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        sys.exit(f"benchmarks/{name}.py ended with {process.returncode}; nothing of it was written down.")
    return f"$ python benchmarks/{name}.py\n{''.join(lines).strip()}"


def _aside(name: str) -> str:
    notes = HERE / name / "notes.md"
    plots = [f"![{plot.stem}]({name}/{plot.name})" for plot in sorted((HERE / name).glob("*.png"))]
    return "".join(f"\n\n{each}" for each in [*plots, *([notes.read_text().strip()] if notes.exists() else [])])


def _circumstances() -> str:
    names = ("torch", "transformers", "accelerate", "trl")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    processor = found[1].strip() if found else platform.machine()
    cores = len(os.sched_getaffinity(0))
    software = ", ".join([f"Python {platform.python_version()}", *versions])
    return f"{datetime.date.today()}; {cores} cores of {processor}; {software}."


if __name__ == "__main__":
    main()
