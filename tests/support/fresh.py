"""Run code in a fresh interpreter whose device variables a test sets itself."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"
DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "SILVERSPOON_CPU_SLOTS",
    "SILVERSPOON_KD_SPLIT",
)

SPLIT_PROGRAM = """
import json, os, sys, time
before = dict(os.environ)
from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu
report = {"result": None, "errors": [], "message": ""}
start = time.perf_counter()
try:
    placement = TeacherPlacement(**json.loads(sys.argv[1]))
    report["result"] = setup_split_gpu(placement)
    report["plain"] = all(type(part) is list and {type(x) for x in part} == {int} for part in report["result"])
except Exception as error:
    report["errors"] = [kind.__name__ for kind in type(error).__mro__]
    report["message"] = str(error)
report["seconds"] = time.perf_counter() - start
report["before"], report["after"] = before, dict(os.environ)
report["torch"] = "torch" in sys.modules
print(json.dumps(report))
"""


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without its device variables, with ``variables``, and with the package importable."""
    kept = {name: value for name, value in os.environ.items() if name not in DEVICE_VARIABLES}
    return {**kept, "PYTHONPATH": str(SOURCE), **variables}


def run_fresh(code: str, variables: Mapping[str, str], arguments: Sequence[str] = (), timeout: float = 60) -> Any:
    """Run ``code`` in a new interpreter and return the JSON value of the last line that it prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment(variables), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Outcome:
    """What one call of setup_split_gpu in a fresh interpreter did."""

    result: tuple[list[int], list[int]] | None
    errors: list[str]  # names of the error's classes
    message: str
    before: dict[str, str]
    after: dict[str, str]
    seconds: float

    @property
    def refused(self) -> bool:
        """Whether it failed with an error that is a ValueError and left the environment as it was."""
        return "ValueError" in self.errors and self.result is None and self.before == self.after

    @property
    def changed(self) -> dict[str, str | None]:
        """The variables that differ afterwards, except the package's own."""
        names = {*self.before, *self.after} - {"SILVERSPOON_KD_SPLIT"}
        return {name: self.after.get(name) for name in names if self.after.get(name) != self.before.get(name)}


def split(teacher: object, variables: Mapping[str, str], **fields: object) -> Outcome:
    """Call setup_split_gpu for the teacher devices ``teacher`` in a fresh interpreter with ``variables``."""
    text = json.dumps({"teacher_only_devices": teacher, **fields})
    report = run_fresh(SPLIT_PROGRAM, variables, [text])
    assert not report["torch"], "the call imported torch"
    assert report.get("plain", True), "ids are not plain numbers"
    result = report["result"] and tuple(report["result"])
    return Outcome(result, report["errors"], report["message"], report["before"], report["after"], report["seconds"])


def no_nvidia_smi(folder: Path) -> dict[str, str]:
    """A PATH without nvidia-smi."""
    return {"PATH": str(folder)}


def fake_nvidia_smi(folder: Path, uuids: Sequence[str]) -> dict[str, str]:
    """A PATH whose nvidia-smi lists one GPU for each UUID; every call adds a line to ``folder/calls``."""
    answers = {
        "-L": [f"GPU {index}: (UUID: {uuid})" for index, uuid in enumerate(uuids)],
        "--query-gpu=index --format=csv,noheader": [str(index) for index in range(len(uuids))],
        "--query-gpu=index,uuid --format=csv,noheader": [f"{index}, {uuid}" for index, uuid in enumerate(uuids)],
    }
    cases = [f'"{asked}") print_lines {" ".join(map(repr, lines))} ;;' for asked, lines in answers.items()]
    script = [
        'print_lines() { for line; do echo "$line"; done; }',
        f'echo "$*" >> "{folder}/calls"',
        'case "$*" in',
        *cases,
        "*) exit 2 ;;",
        "esac",
    ]
    return broken_nvidia_smi(folder, "\n".join(script))


def broken_nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    """A PATH whose nvidia-smi is the shell script ``script``."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": str(folder)}
