"""A run that is killed while it writes a checkpoint continues from a complete one, and ends as if nothing had been."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "killed_saves.py"
FILES = (
    "config.json",
    "model.safetensors",
    "projectors.safetensors",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "distillation.json.part",
)


@pytest.mark.slow
def test_killed_at_every_point_of_a_save(tmp_path):
    done = subprocess.run([sys.executable, PROGRAM, tmp_path], capture_output=True, text=True, timeout=115)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"killed"')]
    points = [report["killed"] for report in reports]
    for name in FILES:
        assert any(point.endswith(f"checkpoint-4/{name}") for point in points), name
    assert "half of checkpoint-4/model.safetensors" in points
    # An older checkpoint of the same name stops being one before anything in it is written.
    assert next(point for point in points if "mkdir" not in point) == "os.remove checkpoint-4/distillation.json"
    renamed = points.index("os.rename checkpoint-4/distillation.json.part")
    assert [report["complete"] for report in reports] == [
        "checkpoint-2" if index <= renamed else "checkpoint-4" for index in range(len(reports))
    ]
    assert any("checkpoint-2" in point for point in points[renamed:]), "the older checkpoint is deleted last"
    assert [report["killed"] for report in reports if not report["same"]] == []
