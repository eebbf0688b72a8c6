"""What is made of a DeepSpeed config before there is any engine."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from silverspoon_kd.distributed.plan import resolve_plan
from silverspoon_kd.errors import CheckpointError, ConfigurationError
from silverspoon_kd.optim import GroupSpec
from silverspoon_kd.training import deepspeed
from support.tiny import arguments

GIVEN = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}


def read(folder, given, **changes):
    """The config as transformers gets it."""
    args = arguments(folder, **changes)
    args.deepspeed = given
    return deepspeed._config_of(args)


def test_what_a_user_cannot_know_is_filled_in(tmp_path):
    config = read(tmp_path, GIVEN)
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] == "auto"
    assert config["zero_allow_untested_optimizer"] is True
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert "gradient_clipping" not in config
    assert read(tmp_path, {})["zero_optimization"]["stage"] == 0
    assert read(tmp_path, {"zero_optimization": {"stage": 3}})["zero_optimization"][
        "stage3_gather_16bit_weights_on_model_save"
    ]


def test_on_cpu_the_optimizer_of_the_config_is_that_of_torch(tmp_path):
    assert read(tmp_path, {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})["optimizer"]["params"] == {
        "lr": "auto",
        "torch_adam": True,
    }
    chosen = {"optimizer": {"type": "AdamW", "params": {"torch_adam": False}}}
    assert read(tmp_path, chosen)["optimizer"]["params"]["torch_adam"] is False
    assert "params" not in read(tmp_path, {"optimizer": {"type": "SGD"}})["optimizer"]


def test_d_07_a_dict_a_file_and_json_text_are_read_alike(tmp_path):
    given = copy.deepcopy(GIVEN)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    assert read(tmp_path, given) == read(tmp_path, str(path)) == read(tmp_path, json.dumps(given))
    assert given == GIVEN


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.json", "nowhere.json' cannot be read"),
        ('{"zero_optimization": ', "cannot be read"),
        (["zero_optimization"], "deepspeed='list' cannot be read"),
        ({"zero_optimization": {"stage": 4}}, "stage=4 in the DeepSpeed config is no stage"),
        ({"gradient_clipping": 0.5}, "gradient_clipping=0.5 in the DeepSpeed config, but max_grad_norm=1.0"),
        ({"zero_optimization": {"stage": 2, "zenflow": {}}}, "zero_optimization.zenflow={} .* cannot work"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "use 'cpu'"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile=True"),
        (
            {
                "zero_force_ds_cpu_optimizer": True,
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
            "replaces optim='sgd' with AdamW",
        ),
    ],
)
def test_configs_that_cannot_work_are_refused(tmp_path, given, message):
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, given, max_grad_norm=1.0)


def test_a_file_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("stage: 2")
    with pytest.raises(ConfigurationError, match=r"config.json' cannot be read"):
        read(tmp_path, str(path))


def test_a_process_without_a_launcher_is_told_how_to_start(tmp_path):
    with pytest.raises(ConfigurationError, match="Start it with torchrun --nproc_per_node=1"):
        arguments(tmp_path, deepspeed=GIVEN)


@pytest.mark.parametrize(
    ("spec", "config", "message"),
    [
        (GroupSpec("block", optimizer="sgd"), GIVEN, "'block' asks for an optimizer of its own"),
        (GroupSpec("block", learning_rate=1e-3), {"scheduler": {"type": "WarmupLR"}}, "gives all parameters one rate"),
        (GroupSpec("block", scheduler="cosine"), {"scheduler": {"type": "WarmupLR"}}, "gives all parameters one rate"),
    ],
)
def test_d_05_what_one_flat_optimizer_cannot_give_is_refused(tmp_path, spec, config, message):
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    args = arguments(tmp_path)
    args.hf_deepspeed_config = HfDeepSpeedConfig(config)
    with pytest.raises(ConfigurationError, match=message):
        deepspeed.check_alignments(args, {"block": spec})
    deepspeed.check_alignments(args, {"block": GroupSpec("block", max_grad_norm=1.0)})


def test_d_12_a_state_that_was_divided_in_another_way_is_refused():
    plan = resolve_plan(distiller="holistic", student_mode="deepspeed-2", num_student_ranks=2)
    deepspeed.check_same_ranks("there", {"num_student_ranks": 2}, plan)
    with pytest.raises(CheckpointError, match="the state of 4 DeepSpeed ranks.* among 2. Resume on 4"):
        deepspeed.check_same_ranks("there", {"num_student_ranks": 4}, plan)
    sharded = resolve_plan(distiller="holistic", student_mode="fsdp", num_student_ranks=2)
    deepspeed.check_same_ranks("there", {"num_student_ranks": 4}, sharded)


def test_ordinary_weights_are_left_alone():
    model = nn.Linear(2, 2)
    weight = model.weight
    assert not deepspeed.is_partitioned(model)
    deepspeed.gather_for_good(model)
    assert model.weight is weight
    assert torch.equal(weight, model.weight)


ABSENT = """
import importlib.util, os, sys
given = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "deepspeed" else given(name, *rest)
import silverspoon_kd
from silverspoon_kd import HolisticDistiller, TrainingArguments
TrainingArguments(output_dir=sys.argv[1], use_cpu=True)
assert "deepspeed" not in sys.modules
os.environ["LOCAL_RANK"] = "0"
try:
    TrainingArguments(output_dir=sys.argv[1], use_cpu=True, deepspeed={"zero_optimization": {}})
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_d_09_without_the_package_everything_else_works(tmp_path):
    done = subprocess.run([sys.executable, "-c", ABSENT, tmp_path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "MissingDependencyError" in done.stdout
    assert "pip install 'silverspoon-kd[deepspeed]'" in done.stdout
