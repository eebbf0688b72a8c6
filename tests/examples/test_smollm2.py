"""The demo in its short form, on the real model and the real text."""

import json
from pathlib import Path

import pytest

from silverspoon_kd.cli.config import load_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2"
OUTPUT = EXAMPLE.parents[1] / "output" / "smollm2-quick"


def test_the_quick_form_differs_from_the_demo_in_size_only():
    demo, quick = (load_config(EXAMPLE / name) for name in ("distill.yaml", "quick.yaml"))
    for name in ("teacher", "distiller", "alignments", "baseline"):
        assert getattr(quick, name) == getattr(demo, name)
    assert quick.data.source == demo.data.source
    sizes = {"output_dir", "max_steps", "per_device_train_batch_size", "warmup_steps"}
    assert {name: value for name, value in quick.training.items() if name not in sizes} == {
        name: value for name, value in demo.training.items() if name not in sizes
    }


@pytest.mark.skipif(
    not (OUTPUT / "results.json").exists(), reason="`make demo QUICK=1`, which it looks at, has not run"
)
def test_the_student_of_the_quick_demo_has_learned():
    results = json.loads((OUTPUT / "results.json").read_text())
    perplexity = results["perplexity"]
    # A tokenizer that was read wrongly gives thousands.
    assert perplexity["teacher"] < 60
    assert perplexity["student after"] < 0.1 * perplexity["student before"]
    assert results["peak_memory"] < 6e9

    from transformers import AutoModelForCausalLM, AutoTokenizer

    student = AutoModelForCausalLM.from_pretrained(OUTPUT / "student")
    tokenizer = AutoTokenizer.from_pretrained(OUTPUT / "student")
    assert student.config.vocab_size == len(tokenizer) == 49152
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert (OUTPUT / "report.html").stat().st_size > 20_000
