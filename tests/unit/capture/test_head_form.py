"""How models make their logits, found out by trying them."""

import pytest
import torch
import transformers
from torch import nn

from silverspoon_kd.capture.head_form import HeadForm, head_form
from silverspoon_kd.capture.probe import example_inputs
from silverspoon_kd.objectives import conventions_of
from support.tiny import llama, qwen3

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(name, **changes):
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def encoder_decoder():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, **sizes))


class OfLogits(nn.Module):
    """Does something with its head's output that no config tells of."""

    def __init__(self, change):
        super().__init__()
        self.embed, self.lm_head, self.change = nn.Embedding(64, 16), nn.Linear(16, 64), change

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids):
        return {"logits": self.change(self.lm_head(self.embed(input_ids)))}


KNOWN = {
    "qwen3": (qwen3, HeadForm("lm_head", plain_loss=True)),
    "bf16": (lambda: qwen3().bfloat16(), HeadForm("lm_head", plain_loss=True)),
    "tied": (lambda: llama(tie_word_embeddings=True), HeadForm("lm_head", plain_loss=True)),
    "gemma2": (lambda: made("Gemma2", head_dim=8), HeadForm("lm_head", 1.0, 30.0, True)),
    "granite": (lambda: made("Granite", logits_scaling=8.0), HeadForm("lm_head", 0.125, None, True)),
    "cohere": (lambda: made("Cohere", logit_scale=0.25), HeadForm("lm_head", 0.25, None, True)),
    "experts": (lambda: made("Mixtral", num_local_experts=4), HeadForm("lm_head", plain_loss=True)),
    # Its own loss is more than the cross entropy.
    "router loss": (
        lambda: made("Mixtral", num_local_experts=4, output_router_logits=True),
        HeadForm("lm_head", plain_loss=False),
    ),
    # Scaled before the head, and labels that are not shifted.
    "t5": (encoder_decoder, HeadForm("lm_head", plain_loss=True)),
    "no config": (lambda: OfLogits(lambda logits: logits), HeadForm("lm_head", plain_loss=False)),
}


def form_of(model):
    inputs = example_inputs(model) or {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}
    return head_form(model, inputs, shifts_labels=conventions_of(model).shifts_labels)


@pytest.mark.parametrize("name", KNOWN)
def test_the_form_of_the_head_is_found(name):
    make, expected = KNOWN[name]
    assert form_of(make()) == expected


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "router loss"])
def test_the_form_makes_the_models_logits(name):
    model = KNOWN[name][0]().eval()
    inputs = example_inputs(model) or {"input_ids": torch.arange(6).view(2, 3)}
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        logits = model(**inputs)["logits"]
    model.get_output_embeddings()._forward_hooks.clear()
    torch.testing.assert_close(form_of(model).logits(seen[0]), logits)


def test_the_model_is_left_as_it_is():
    model = made("Gemma2", head_dim=8).train()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.random.get_rng_state()
    assert isinstance(form_of(model), HeadForm)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), numbers)


def other_scale():
    model = made("Granite", logits_scaling=8.0)
    model.config.logits_scaling = 8.0
    model.lm_head.register_forward_hook(lambda module, args, output: output / 2)
    return model


def parametrised():
    model = qwen3()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OfLogits(lambda logits: logits + 1), "are not what its output head gives out"),
        (lambda: OfLogits(lambda logits: logits.softmax(-1)), "are not what its output head gives out"),
        (lambda: OfLogits(lambda logits: logits[:, -1:]), "are not what its output head gives out"),
        (other_scale, "has hooks"),
        (parametrised, "ParametrizedLinear"),
        (lambda: nn.Linear(3, 3), "no output head"),
        (lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**TINY_VIT)), "no output head"),
    ],
)
def test_anything_else_is_told(make, words):
    assert words in form_of(make())


TINY_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": 32,
}
