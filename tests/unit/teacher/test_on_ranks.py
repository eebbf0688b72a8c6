"""A teacher that is sharded over two ranks; everything runs in one torchrun."""

import json

import pytest
import torch

from support import ranks, sharded_ranks
from support.distil import KINDS
from support.tiny import qwen3

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model."""
    folder = tmp_path_factory.mktemp("teacher")
    qwen3(8).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory, saved):
    """The reports of both ranks, and what they printed."""
    folder = tmp_path_factory.mktemp("sharded")
    ranks.torchrun(ranks.Path(sharded_ranks.__file__), [folder, saved], log=folder / "log.txt", timeout=110, fork=True)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in "01"], (folder / "log.txt").read_text()


@pytest.fixture(params=[0, 1], ids=["rank-0", "rank-1"])
def report(request, output):
    return output[0][request.param]


@pytest.mark.parametrize("name", ["missing", "none", "empty", "tuple", "small units"])
def test_e_02_blocks_named_or_not(name, report):
    found = report["no_split_modules"][name]
    assert found["difference"] < 1e-6
    assert 0.4 < found["share"] < 0.6


@pytest.mark.parametrize("name", ["stack", "gpt2"])
def test_e_05_tied_weights_as_large_as_a_unit(name, report):
    found = report["tied"][name]
    assert found["difference"] < 1e-5
    assert 0.4 < found["share"] < 0.6


@pytest.mark.parametrize("styles", ["named", "torch"])
def test_e_18_a_tensor_parallel_teacher_is_really_split(styles, report):
    found = report["tensor_parallel"][styles]
    assert found["difference"] < 1e-5
    assert found["share"] == 0.5


def test_e_11_mixed_precision_as_with_a_replicated_teacher(report):
    found = report["mixed"]
    assert all(one == other for one, other in found["dtypes"])
    assert found["difference"] < 1e-2
    assert found["weights"] == ["torch.float32"]


def test_e_12_every_rank_has_the_saved_weights(report, saved):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved)
    with torch.no_grad():
        expected = model(sharded_ranks.IDS).logits
    assert torch.allclose(torch.tensor(report["loaded"]["logits"]), expected, atol=1e-6)


def test_b_06_every_rank_has_the_rotary_frequencies(report):
    expected = qwen3(8).model.rotary_emb.inv_freq
    assert torch.allclose(torch.tensor(report["loaded"]["rotary"]), expected, rtol=1e-6)


def test_e_13_uneven_numbers_of_rows_do_not_hang(report):
    assert report["uneven"] == dict.fromkeys(KINDS, 2)


def test_e_14_every_rank_makes_the_same_groups(output):
    first, second = (each["loaded"]["groups"] for each in output[0])
    assert first == second


def test_e_19_no_rank_keeps_a_whole_copy(report):
    assert report["loaded"]["share"] == 0.5
    assert report["loaded"]["whole"] == 0
    # The last forward was stopped before the head.
    assert report["captured"]["share"] == 0.5


def test_e_20_features_are_plain_whole_tensors(report):
    found = report["captured"]
    assert found["plain"]
    assert found["shapes"] == [[2, 12, 32]] * 8
    assert found["difference"] < 1e-6
    assert found["losses"]["sharded"] == pytest.approx(found["losses"]["replicated"], rel=1e-6)
    assert len(found["losses"]["sharded"]) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_b_10_the_student_is_wrapped_whatever_the_device_maps_say(kind, output):
    first, second = (each["self_placed"][kind] for each in output[0])
    assert first == second  # also the weights
    assert (first["wrapped"], first["parallel"]) == ("DistributedDataParallel", False)


@pytest.mark.parametrize("kind", KINDS)
def test_b_14_the_teacher_is_not_prepared(kind, report):
    found = report["self_placed"][kind]
    assert (found["teacher"], found["hooks"]) == ("Qwen3ForCausalLM", 0)


def test_j_08_gloo_and_a_quiet_end(output):
    reports, log = output
    assert {each["self_placed"][kind]["backend"] for each in reports for kind in KINDS} == {"gloo"}
    assert "destroy_process_group" not in log
    assert "nccl" not in log.lower()
