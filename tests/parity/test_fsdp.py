"""An FSDP student is really sharded, and its numbers are those of one process."""

from pathlib import Path

import pytest
import torch

from parity.cases import MOVED
from parity.runs import identical, relative
from support import fsdp_ranks
from support.fsdp_ranks import CASES
from support.ranks import torchrun

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROGRAM = Path(fsdp_ranks.__file__)
STATES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
BLOCKS = {f"student.model.layers.{index}" for index in range(4)}
ENDS = {"", "student.model.embed_tokens", "student.lm_head"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have written everything, and then three what goes on from there."""
    folder = tmp_path_factory.mktemp("fsdp")
    torchrun(PROGRAM, [folder], log=folder / "two.txt", timeout=110, fork=True)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    def outcomes(name, num_ranks=2):
        return [torch.load(folder / f"{name}.rank{rank}.pt", weights_only=True) for rank in range(num_ranks)]

    return outcomes


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_weights_are_those_of_one_process(name, ranks, tmp_path):
    expected, outcomes = fsdp_ranks.outcome(fsdp_ranks.build(name, tmp_path, fused_losses=False)), ranks(name)
    assert relative(expected["after"], expected["before"]) > MOVED
    for outcome in outcomes:
        assert identical(outcome["after"], outcomes[0]["after"]) == []
        assert relative(outcome["after"], expected["after"]) < 1e-6
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_e_01_the_student_is_really_sharded(name, ranks):
    assert sum(outcome["share"] for outcome in ranks(name)) == pytest.approx(1.0)
    assert all(0.4 < outcome["share"] < 0.6 for outcome in ranks(name))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("list", BLOCKS | ENDS),
        ("unwrapped", {""}),
        ("by-name", {f"{block}.mlp" for block in BLOCKS} | ENDS),
        ("tied", BLOCKS | {""}),
    ],
)
def test_blocks_and_untied_ends_are_units(name, expected, ranks):
    assert set(ranks(name)[0]["units"]) == expected


PLAIN = {"forward": 0, "backward": 0, "frees": True, "dtype": "None"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("list", {}),
        ("prefetch", {"forward": 1, "backward": 1}),
        ("grad-op", {"frees": False}),
        ("mixed", {"dtype": "torch.bfloat16"}),
    ],
)
def test_the_settings_reach_the_units(name, changes, ranks):
    assert ranks(name)[0]["settings"] == {**PLAIN, **changes}


def test_only_what_asks_for_it_is_recomputed(ranks):
    asked = {name for name in CASES if ranks(name)[0]["recomputes"]}
    assert asked == {"recomputed", "recomputed-holistic"}


def test_sizes_decide_where_asked(ranks):
    units = set(ranks("sizes")[0]["units"])
    assert "" in units
    assert len(units) > 2
    assert units.isdisjoint({f"{block}.mlp.down_proj" for block in BLOCKS})  # which alone is smaller than half of it
    assert units != BLOCKS | ENDS


@pytest.mark.parametrize("name", CASES)
def test_e_07_the_optimizer_holds_the_sharded_parameters(name, ranks):
    assert all(outcome["held"] for outcome in ranks(name))


def test_e_10_limits_are_of_the_whole_gradient(ranks, tmp_path):
    """Plain SGD: a clipped step moves the weights of an alignment by its limit."""
    outcome, expected = ranks("clipped")[0], fsdp_ranks.outcome(fsdp_ranks.build("clipped", tmp_path))
    for name in ("model.layers.0", "model.layers.3"):
        own = [key for key in expected["after"] if f"{name}." in key]
        one, other = ({key: each["after"][key] - each["before"][key] for key in own} for each in (outcome, expected))
        assert relative(one, other) < 1e-5


def test_e_09_frozen_parameters_stay(ranks):
    for outcome in ranks("frozen"):
        changed = identical(outcome["after"], outcome["before"])
        assert "student.model.embed_tokens.weight" not in changed
        assert "student.model.layers.1.mlp.down_proj.weight" in changed


@pytest.mark.parametrize("name", ["other", "meta"])
def test_e_12_every_rank_starts_with_the_weights_of_the_first(name, ranks, tmp_path):
    expected = fsdp_ranks.other_weights(tmp_path, meta=False)
    for outcome in ranks(name):
        assert identical(outcome["before"], expected["before"]) == []
        assert relative(outcome["after"], expected["after"]) < 1e-6


def test_mixed_precision(ranks, tmp_path):
    expected = fsdp_ranks.mixed(tmp_path)
    for outcome in ranks("mixed"):
        assert outcome["dtypes"] == ["torch.float32"]
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=0.02)
        assert identical(outcome["after"], ranks("mixed")[0]["after"]) == []


def test_evaluation_before_while_and_after_training(ranks, tmp_path):
    expected = fsdp_ranks.evaluated(tmp_path)
    for outcome in ranks("evaluated"):
        assert outcome["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        torch.testing.assert_close(outcome["logits"], expected["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("state", STATES)
def test_e_15_a_resumed_run_equals_one_without_a_break(state, ranks):
    for outcome in ranks(state):
        assert outcome["weights"] == []
        assert outcome["optimizer"]
        assert outcome["logs"]
        assert set(outcome["tags"]) == {"student", *(f"model.layers.{index}" for index in range(4))}


@pytest.mark.parametrize("state", STATES)
def test_e_15_the_saved_student_is_one_for_from_pretrained(state, ranks):
    for outcome in ranks(state):
        assert outcome["loaded"] == []
        assert outcome["class"] == ["Qwen3ForCausalLM"]
        whole = "checkpoint-3/model.safetensors" in outcome["files"]
        assert whole == (state == "FULL_STATE_DICT")
        assert not [name for name in outcome["files"] if whole and "pytorch_model" in name]


@pytest.mark.parametrize("state", STATES)
def test_other_numbers_of_ranks_go_on_from_a_checkpoint(state, folder, ranks):
    name = f"{state}-3"
    torchrun(PROGRAM, [folder, name], log=folder / f"{name}.txt", num_ranks=3, timeout=90, fork=True)
    for outcome in ranks(name, 3):
        assert relative(outcome["after"], ranks(state)[0]["after"]) < 1e-5
