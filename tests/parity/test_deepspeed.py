"""DeepSpeed students on two ranks, stages 0 to 3: what a run is, learns, clips, logs, saves and resumes."""

import math
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from parity.cases import MOVED, ParityRows, build_student, build_teacher
from parity.runs import relative
from support import deepspeed_ranks
from support.deepspeed_ranks import BY_NAME, HALF, INSIDE, build_tiny
from support.distil import KINDS, training_logs
from support.ranks import started
from support.reference import Pair, Recipe, distil
from support.tiny import Rows, qwen3

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

EXACT = 1e-5
PATIENCE = 100  # seconds for one run, the first with the start of the ranks


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each rank found in a run; all are made one after the other in one start."""
    folder = tmp_path_factory.mktemp("deepspeed")
    log = folder / "log"
    with started(Path(deepspeed_ranks.__file__), [folder], log=log, num_ranks=2, fork=True) as (launcher, _):

        def found(name):
            paths = [deepspeed_ranks.path_of(folder, name, rank) for rank in range(2)]
            deadline = time.monotonic() + PATIENCE
            while launcher.poll() is None and not all(path.exists() for path in paths):
                assert time.monotonic() < deadline, f"{name} takes too long:\n{log.read_text()[-6000:]}"
                time.sleep(0.1)
            assert all(path.exists() for path in paths), f"{name} failed:\n{log.read_text()[-6000:]}"
            return [torch.load(path, weights_only=True) for path in paths]

        yield found


@pytest.fixture(scope="module")
def ranks(both):
    """What the first rank found."""
    return lambda name: both(name)[0]


def alone(kind, folder, **changes):
    """The same run in this process, with the rows of both ranks in one batch."""
    distiller = deepspeed_ranks.build_tiny(
        kind, folder, per_device_train_batch_size=2 * deepspeed_ranks.BATCH, **changes
    )
    distiller.train()
    return distiller


def agree(found, wanted, exact=EXACT):
    """Losses and norms of each step are those of one process."""
    assert len(found) == len(wanted) > 0
    for own, other in zip(found, wanted, strict=True):
        numbers = {key: value for key, value in other.items() if key.startswith(("loss", "grad_norm"))}
        assert {key: own[key] for key in numbers} == pytest.approx(numbers, rel=exact)


@pytest.mark.parametrize("stage", range(4))
def test_d_09_every_stage_trains_with_the_numbers_of_one_process(ranks, tmp_path, stage):
    found = ranks("stages")[f"{stage} replicated"]
    assert (found["wrapped"], found["stage"]) == ("DeepSpeedEngine", stage)
    assert found["empty"] == (found["parameters"] if stage == 3 else 0)
    assert ("Zero" in found["optimizer"]) == (stage > 0)
    agree(found["logs"], training_logs(alone("holistic", tmp_path)))


@pytest.mark.parametrize(
    ("stage", "placement"),
    [(1, "replicated"), (2, "replicated"), (2, "sharded"), (3, "replicated"), (3, "sharded")],
)
def test_d_02_a_teacher_never_gets_an_engine(ranks, stage, placement):
    found = ranks("stages")[f"{stage} {placement}"]
    assert found["own engines"] == 1
    assert found["teacher engines"] == 0
    assert found["teacher"] == ("FSDPQwen3ForCausalLM" if placement == "sharded" else "Qwen3ForCausalLM")


@pytest.mark.parametrize("stage", [2, 3])
def test_d_03_a_sharded_teacher_beside_the_engine_gives_the_same_numbers(ranks, stage):
    found = ranks("stages")
    agree(found[f"{stage} sharded"]["logs"], found[f"{stage} replicated"]["logs"], 1e-6)


def test_d_05_rates_keep_their_ratio_in_every_step(ranks):
    found = ranks("rates")
    share = [1.0, 0.75, 0.5, 0.25]
    assert [entry["learning_rate/model.layers.1"] for entry in found["logs"]] == pytest.approx(
        [1e-3 * s for s in share]
    )
    assert [entry["learning_rate/model.layers.0"] for entry in found["logs"]] == pytest.approx(
        [1e-4 * s for s in share]
    )
    assert set(found["last"].values()) == {0.0}
    assert {name for name, _, _ in found["tags"]} == {"student", *(f"model.layers.{index}" for index in range(2))}


def test_d_05_an_optimizer_in_the_config_gets_the_groups_of_the_alignments(ranks):
    found = ranks("config_blocks")
    assert found["optimizer"] == "AdamW"
    assert set(found["tags"]) == {"student", *(f"model.layers.{index}" for index in range(2))}
    agree(found["own"], found["plain"], 1e-6)
    assert relative(found["own weights"], found["plain weights"]) < 1e-6


def test_d_05_a_schedule_in_the_config_is_that_of_all_groups_or_refused(ranks):
    found = ranks("config_blocks")
    assert found["scheduled"] == sorted(found["scheduled"]) and found["scheduled"][-1] == pytest.approx(1e-3)
    assert "gives all parameters one rate" in found["refused rate"]
    assert "asks for an optimizer of its own" in found["refused optimizer"]


@pytest.mark.parametrize("how", ["0", "1", "2", "2 offloaded", "3", "3 offloaded"])
def test_d_06_each_alignment_is_clipped_once_to_its_own_limit(both, how):
    for found in (each[how] for each in both("clipped")):
        assert found["engine clips"] == 0.0
        case, before = BY_NAME["holistic-narrow"], found["before"]
        pairs = [
            Pair(layer, layer, 1000.0, output_projector=_linear(before, index)) for index, layer in enumerate((0, 2))
        ]
        recipe = Recipe("holistic", learning_rate=1.0, pairs=pairs, max_grad_norm=1.0)
        result = distil(build_teacher(case), build_student(case), recipe, [ParityRows(4).rows])
        wanted = {f"student.{name}": each.detach() for name, each in result.student.named_parameters()}
        for index, pair in enumerate(result.pairs):
            own = pair.output_projector.named_parameters()
            wanted |= {f"projectors.{index}.output.{name}": each.detach() for name, each in own}
        moved = {name: found["after"][name].double() - before[name].double() for name in before}
        by_hand = {name: wanted[name] - before[name].double() for name in before}
        assert relative(moved, by_hand) < 1e-4
        assert relative(found["after"], before) > MOVED
        for layer in (0, 2):
            own = [moved[name] for name in moved if f"layers.{layer}." in name or f"projectors.{layer // 2}." in name]
            assert math.sqrt(sum(float((each**2).sum()) for each in own)) == pytest.approx(1.0, rel=1e-3)
            assert found["norms"][f"grad_norm/model.layers.{layer}"] > 10


def _linear(before, index):
    layer = nn.Linear(24, 32)
    layer.load_state_dict({name: before[f"projectors.{index}.output.{name}"] for name in ("weight", "bias")})
    return layer


def test_d_07_a_dict_a_file_and_json_text_train_alike_and_stay_as_they_are(ranks):
    found = ranks("config_forms")
    assert found["same"] and found["unchanged"]
    assert all(math.isfinite(entry["loss"]) for entry in found["logs"])


@pytest.mark.parametrize("kind", KINDS)
def test_d_08_models_made_after_the_arguments_are_partitioned_and_train_alike(ranks, tmp_path, kind):
    found = ranks("born_partitioned")[kind]
    assert found["partitioned"]
    assert found["teacher"]
    agree(found["logs"], training_logs(alone(kind, tmp_path)))


def test_d_08_models_loaded_after_the_arguments_train_alike(ranks, tmp_path):
    agree(ranks("born_partitioned")["loaded"]["logs"], training_logs(alone("response", tmp_path)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_d_11_frozen_weights_are_in_no_group(ranks, stage):
    found = ranks("frozen")[stage]
    assert found["unchanged"]
    assert "student.model.layers.0.mlp.up_proj.weight" in found["grouped"]
    assert "student.model.embed_tokens.weight" not in found["grouped"]


@pytest.mark.parametrize("stage", [2, 3])
def test_d_12_two_steps_a_resume_and_two_steps_are_four(both, stage):
    for report in both("resumed"):
        found = report[stage]
        assert relative(found["again"], found["straight"]) < 1e-7
        straight, again = found["logs"]
        assert again == straight
        assert found["tags"][0] == found["tags"][1]
        assert found["rates"][0] == found["rates"][1]
        assert {"config.json", "distillation.json", "model.safetensors", "projectors.safetensors"} <= set(
            found["files"]
        )
        assert "global_step4" in found["files"]


def test_d_12_an_engine_state_that_does_not_fit_is_refused(ranks):
    found = ranks("resumed")
    assert "trained with deepspeed-2, but this run trains it with deepspeed-1" in found["other stage"]
    assert "trained with deepspeed-2, but this run trains it with no sharding" in found["without"]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_final_folder_and_the_best_checkpoint_hold_whole_weights(ranks, stage):
    from transformers import AutoModelForCausalLM

    found = ranks("saved")[stage]
    assert found["best"] == "checkpoint-1"
    for folder in (Path(found["folder"]), Path(found["first"])):
        student = AutoModelForCausalLM.from_pretrained(folder)
        for name, parameter in student.named_parameters():
            assert torch.equal(parameter, found["weights"][f"student.{name}"]), name
        projectors = safetensors.torch.load_file(folder / "projectors.safetensors")
        assert projectors
        for name, value in projectors.items():
            assert torch.equal(value, found["weights"][f"projectors.{name}"]), name
    last = AutoModelForCausalLM.from_pretrained(found["last"])
    assert not torch.equal(last.model.embed_tokens.weight, found["weights"]["student.model.embed_tokens.weight"])


@pytest.mark.parametrize("stage", [2, 3])
def test_c_02_nothing_of_the_teacher_is_saved(ranks, stage):
    found = ranks("saved")[stage]
    names = {name.partition(".")[0] for name in found["weights"]}
    assert names == {"student", "projectors"}
    keys = set(safetensors.torch.load_file(Path(found["folder"]) / "model.safetensors"))
    student = qwen3(1, layers=2, hidden=16)
    assert keys == set(student.state_dict())


@pytest.mark.parametrize("stage", [2, 3])
def test_c_04_the_teacher_is_what_it_was(ranks, stage):
    found = ranks("saved")[stage]
    assert found["teacher"]
    assert found["gradients"] == []


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation_before_training_and_after_it(ranks, tmp_path, stage):
    found = ranks("evaluated_first")[stage]
    distiller = alone("holistic", tmp_path, given={"eval_dataset": Rows(n=8, seed=3)})
    wanted = [distiller.evaluate()["eval_loss"]]
    fresh = build_tiny("holistic", tmp_path, given={"eval_dataset": Rows(n=8, seed=3)})
    wanted.insert(0, fresh.evaluate()["eval_loss"])
    assert [found["metrics"]["eval_loss"], found["after"]["eval_loss"]] == pytest.approx(wanted, rel=EXACT)
    agree(found["logs"], training_logs(distiller))


def test_d_10_blocks_under_zero_3_learn_what_they_learn_alone(ranks, tmp_path):
    agree(ranks("born_partitioned")["blockwise"]["logs"], training_logs(alone("blockwise", tmp_path)))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_d_10_losses_inside_blocks_find_their_weights_gathered(ranks, tmp_path, checkpointing):
    agree(ranks("inside_blocks")[str(checkpointing)], training_logs(alone("holistic", tmp_path, modules=INSIDE)))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_training_goes_on_from_the_first(ranks, tmp_path, stage):
    first, second = ranks("trained_again")[stage]
    distiller = alone("holistic", tmp_path)
    agree(first, training_logs(distiller))
    distiller.train()
    agree(second, training_logs(distiller))


def test_c_11_adapters_of_a_student_that_teaches_itself_are_saved_whole(ranks, tmp_path):
    found = ranks("adapters")
    student = deepspeed_ranks.with_adapters(qwen3(1, layers=2, hidden=16))
    values = {"student": student, "teacher": student.get_base_model(), "learning_rate": 1.0}
    agree(found["logs"], training_logs(alone("response", tmp_path, **values)))
    saved = safetensors.torch.load_file(Path(found["folder"]) / "adapters" / "adapter_model.safetensors")
    adapters = {name: value for name, value in found["weights"].items() if "lora_" in name}
    assert len(saved) == len(adapters) > 0
    for name, value in saved.items():
        assert torch.equal(value, adapters["student." + name.replace(".weight", ".default.weight")])


def test_a_plain_module_is_saved_whole(ranks):
    found = ranks("adapters")
    saved = safetensors.torch.load_file(Path(found["folder"]) / "plain" / "model.safetensors")
    parameters = {name.removeprefix("student."): value for name, value in found["plain"].items() if "student." in name}
    assert parameters.keys() <= saved.keys()
    assert all(torch.equal(saved[name], value) for name, value in parameters.items())


@pytest.mark.parametrize(("kind", "stage"), HALF)
def test_half_precision_is_near_full_precision(ranks, tmp_path, kind, stage):
    found = ranks("half_precision")[f"{kind} {stage}"]
    wanted = training_logs(alone(kind, tmp_path, learning_rate=0.01))
    assert [entry["loss"] for entry in found] == pytest.approx([entry["loss"] for entry in wanted], rel=0.05)
    assert [entry["grad_norm"] for entry in found] == pytest.approx([entry["grad_norm"] for entry in wanted], rel=0.1)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_block_without_finite_gradients_does_not_stop_the_others(ranks, stage):
    found = ranks("one_block_broken")[stage]
    assert found["finite"]
    assert math.isnan(found["logs"][1]["grad_norm/model.layers.1"])
    assert math.isfinite(found["logs"][1]["grad_norm/model.layers.0"])
    assert found["stopped"] and all("layers.1." in name or "projectors.1." in name for name in found["stopped"])
