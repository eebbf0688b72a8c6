import copy
from collections import namedtuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from silverspoon_kd import fuse_projectors_into_module
from silverspoon_kd.errors import ConfigurationError
from support.tiny import llama


def _linear(inputs, outputs, bias=True, seed=0):
    torch.manual_seed(seed + 10 * inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias)


@pytest.mark.parametrize("biases", [(True, True, True), (False, True, False), (False, False, True), (False,) * 3])
def test_linear_between_projectors_becomes_one_linear(biases):
    before, module, after = (
        _linear(*size, bias=bias) for size, bias in zip([(5, 3), (3, 4), (4, 6)], biases, strict=True)
    )
    fused = fuse_projectors_into_module(module, before, after)
    assert type(fused) is nn.Linear
    assert (fused.in_features, fused.out_features) == (5, 6)
    assert (fused.bias is not None) is any(biases)
    x = torch.randn(2, 7, 5)
    torch.testing.assert_close(fused(x), after(module(before(x))), rtol=1e-5, atol=1e-6)
    doubles = [copy.deepcopy(part).double() for part in (before, module, after)]
    exact = doubles[2](doubles[1](doubles[0](torch.eye(5, dtype=torch.float64)))) - doubles[2](
        doubles[1](doubles[0](torch.zeros(5, dtype=torch.float64)))
    )
    torch.testing.assert_close(fused.weight.double(), exact.T, rtol=1e-6, atol=1e-7)


def test_one_side_is_enough_and_none_is_nothing():
    module, after = _linear(3, 4), _linear(4, 2)
    x = torch.randn(2, 3)
    torch.testing.assert_close(fuse_projectors_into_module(module, None, after)(x), after(module(x)))
    before = _linear(6, 3)
    y = torch.randn(2, 6)
    torch.testing.assert_close(fuse_projectors_into_module(module, before)(y), module(before(y)))
    assert fuse_projectors_into_module(module) is module


def test_folding_keeps_the_modules_dtype_and_changes_no_source():
    module, after = _linear(3, 4).to(torch.bfloat16), _linear(4, 2)
    weight = module.weight.clone()
    assert fuse_projectors_into_module(module, None, after).weight.dtype == torch.bfloat16
    assert torch.equal(module.weight, weight)


def test_widths_that_do_not_meet_are_refused():
    with pytest.raises(ConfigurationError, match="4 outputs was asked to feed one with 5 inputs"):
        fuse_projectors_into_module(_linear(3, 4), None, _linear(5, 2))


def test_decoder_layer_keeps_its_keyword_arguments():
    model = llama(hidden=16, layers=2, num_attention_heads=2, num_key_value_heads=1)
    before, after = _linear(24, 16), _linear(16, 24)
    original = model.model.layers[1]
    fused = fuse_projectors_into_module(original, before, after)
    ids = torch.arange(6)[None]
    seen = {}
    original.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)

    class Wide(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return fused(torch.cat([hidden_states, hidden_states[..., :8]], -1), **kwargs)[..., :16]

    model.model.layers[1] = Wide()
    logits = model(ids).logits
    assert {"position_embeddings", "attention_mask"} <= set(seen)
    hidden = model.model.layers[0](
        model.model.embed_tokens(ids),
        position_embeddings=seen["position_embeddings"],
        attention_mask=seen["attention_mask"],
    )
    wide = torch.cat([hidden, hidden[..., :8]], -1)
    inner = original(
        before(wide), position_embeddings=seen["position_embeddings"], attention_mask=seen["attention_mask"]
    )
    expected = model.lm_head(model.model.norm(after(inner)[..., :16]))
    torch.testing.assert_close(logits, expected)


class _Returns(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, *args, **kwargs):
        return self.wrap(args[0] if args else kwargs["hidden_states"])


def test_other_outputs_are_passed_on():
    before, after = _linear(4, 3), _linear(3, 5)
    x = torch.randn(2, 4)
    expected = after(before(x))
    pair = namedtuple("pair", "hidden extra")
    cases = {
        tuple: (lambda h: (h, "rest"), lambda out: out[0], lambda out: out[1] == "rest"),
        list: (lambda h: [h, "rest"], lambda out: out[0], lambda out: out[1] == "rest"),
        dict: (lambda h: {"a": h, "b": 1}, lambda out: out["a"], lambda out: out["b"] == 1),
        pair: (lambda h: pair(h, "rest"), lambda out: out.hidden, lambda out: out.extra == "rest"),
        BaseModelOutput: (
            lambda h: BaseModelOutput(last_hidden_state=h, hidden_states=(h,)),
            lambda out: out.last_hidden_state,
            lambda out: out.hidden_states[0].shape[-1] == 3,
        ),
    }
    for kind, (wrap, pick, rest) in cases.items():
        fused = fuse_projectors_into_module(_Returns(wrap), before, after)
        for output in (fused(x), fused(mask=None, hidden_states=x)):
            assert type(output) is kind
            assert rest(output)
            torch.testing.assert_close(pick(output), expected)


def test_convolution_projectors_and_checkpoints_of_the_wrapper():
    module = nn.Conv2d(3, 4, 3, padding=1)
    before, after = nn.Conv2d(5, 3, 1), nn.Conv2d(4, 2, 1)
    fused = fuse_projectors_into_module(module, before, after)
    x = torch.randn(1, 5, 6, 6)
    torch.testing.assert_close(fused(x), after(module(before(x))))
    prefixes = {name.split(".")[0] for name in fused.state_dict()}
    assert prefixes == {"module", "input_projector", "output_projector"}


def test_nothing_to_project_is_said():
    with pytest.raises(ConfigurationError, match="none of them is a tensor"):
        fuse_projectors_into_module(nn.Identity(), _linear(2, 2))("text")
    with pytest.raises(ConfigurationError, match="returned a str"):
        fuse_projectors_into_module(_Returns(lambda h: "text"), None, _linear(2, 2))(torch.ones(2))
