import pytest

from silverspoon_kd import freeze_parameters
from silverspoon_kd.errors import ConfigurationError
from support.more_models import resnet
from support.tiny import llama, qwen3


def _frozen(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def test_patterns_match_whole_names():
    model = qwen3(layers=2)
    names = freeze_parameters(model, [r"model\.embed_tokens\.weight", r"model\.layers\.1\.mlp\..*"])
    expected = {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert set(names) == _frozen(model) == expected | {"model.embed_tokens.weight"}


def test_others_stay_as_they_are_unless_thawed():
    model = llama(layers=2)
    model.lm_head.weight.requires_grad_(False)
    freeze_parameters(model, r"model\.norm\.weight")
    assert _frozen(model) == {"lm_head.weight", "model.norm.weight"}
    freeze_parameters(model, r"model\.embed_tokens\..*", thaw_not_matched=True)
    assert _frozen(model) == {"model.embed_tokens.weight"}


def test_tied_parameter_is_frozen_under_either_name():
    model = llama(tie_word_embeddings=True)
    assert freeze_parameters(model, r"lm_head\.weight", thaw_not_matched=True) == ["lm_head.weight"]
    assert not model.model.embed_tokens.weight.requires_grad


def test_vision_model():
    model = resnet()
    names = freeze_parameters(model, r"resnet\.embedder\..*")
    assert names
    assert all(name.startswith("resnet.embedder.") for name in names)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"model\.layers\.0", r"add '\.\*' for everything below"),
        (r"model\.embed_token\.weight", r"Did you mean 'model\.embed_tokens\.weight'"),
        (r"model\.(", "no regular expression"),
    ],
)
def test_patterns_that_match_nothing_change_nothing(pattern, message):
    model = llama(layers=1)
    with pytest.raises(ConfigurationError, match=message):
        freeze_parameters(model, [r"lm_head\.weight", pattern])
    assert not _frozen(model)
