"""Two ranks with simulated devices: collectives, DDP, FSDP2, tensor parallelism."""

from pathlib import Path

import pytest
import torch

from support.ranks import torchrun
from support.tiny import distance

PROGRAM = Path(__file__).parents[1] / "support" / "simulated_ranks.py"


@pytest.mark.multiprocess
def test_two_ranks(library, tmp_path):
    torchrun(PROGRAM, [tmp_path], log=tmp_path / "log.txt", timeout=120)
    found = [torch.load(tmp_path / f"sim{rank}.pt", weights_only=True) for rank in range(2)]
    expected = cpu_run(tmp_path / "cpu")
    assert found[0]["losses"] == found[1]["losses"]
    assert distance(found[0]["weights"], found[1]["weights"]) == 0
    assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert distance(found[0]["weights"], expected["weights"]) < 1e-5


def cpu_run(folder: Path) -> dict:
    """The same training in one process on the CPU, with the whole batch."""
    from support.distil import make, training_logs
    from support.tiny import weights

    distiller = make(
        "holistic", folder, max_steps=3, per_device_train_batch_size=4, learning_rate=1.0, report_to="none"
    )
    distiller.train()
    return {"losses": [entry["loss"] for entry in training_logs(distiller)], "weights": weights(distiller.root)}
