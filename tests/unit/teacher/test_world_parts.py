"""The parts of the teacher world that need no second process of their own."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from silverspoon_kd.errors import PlacementError, TeacherError
from silverspoon_kd.teacher.world.codec import decode, encode
from silverspoon_kd.teacher.world.pipeline import pipeline_map
from silverspoon_kd.teacher.world.strategies import check_tensor_plan
from silverspoon_kd.teacher.world.weights import adopt_weights, dump, load, places_in, share_weights
from support.fresh import run_fresh
from support.tiny import qwen3


def test_batches_cross_as_json_and_tensors():
    batch = {"ids": torch.arange(3), "nested": {"list": [torch.ones(2), None, "text", 1.5]}, "flag": True}
    tensors = []
    form = encode(batch, tensors)
    assert len(tensors) == 2
    back = decode(form, tensors)
    assert back["flag"] is True and back["nested"]["list"][1:] == [None, "text", 1.5]
    assert back["ids"] is batch["ids"] and back["nested"]["list"][0] is batch["nested"]["list"][0]
    with pytest.raises(TeacherError, match="A set in the teacher's batch"):
        encode({"bad": {1, 2}}, [])


def test_shared_weights_are_the_same_weights():
    model = qwen3(tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shared = share_weights(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert shared.nbytes < 1.2 * sum(p.numel() * p.element_size() for p in model.parameters()) + 4096 * 200


PEAK_OF_SHARING = """
import resource, torch
from silverspoon_kd.teacher.world.weights import share_weights
def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
model = torch.nn.ParameterList(torch.zeros(2 ** 22) + 1 for _ in range(12))
before = most()
shared = share_weights(model)
print((most() - before) / shared.nbytes)
"""


def test_sharing_a_module_takes_no_second_copy():
    assert run_fresh(PEAK_OF_SHARING, {}) < 0.2


def test_a_pickled_module_shares_its_pages():
    model = qwen3(tie_word_embeddings=True)
    shared = share_weights(model)
    data = dump(model, shared)
    assert len(data) < 200_000
    copy = load(data, shared.path, shared.nbytes)
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    ids = torch.arange(1, 9)[None]
    assert torch.equal(copy.eval()(ids).logits, model.eval()(ids).logits)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    assert copy.model.norm.weight.eq(3.0).all()


def test_another_process_maps_the_weights():
    model = nn.Linear(4, 4)
    shared = share_weights(model)
    code = (
        "import sys, torch; from silverspoon_kd.teacher.world.weights import map_file;"
        "base = map_file(sys.argv[1], int(sys.argv[2])); base[:64].view(torch.float32).fill_(7.0)"
    )
    subprocess.run([sys.executable, "-c", code, shared.path, str(shared.nbytes)], check=True)
    assert model.weight.eq(7.0).all()


def test_equal_modules_of_other_ranks_give_their_own_copy_up():
    model, other = qwen3(), qwen3()
    shared = share_weights(model)
    adopt_weights(other, shared.path, shared.nbytes, places_in(shared, model))
    with torch.no_grad():
        model.lm_head.weight.fill_(2.0)
    assert other.lm_head.weight.eq(2.0).all()


def test_b_02_b_03_pipeline_map_covers_the_model_and_keeps_blocks_whole():
    with torch.device("meta"):
        models = [qwen3(layers=5), qwen3(layers=5, tie_word_embeddings=True)]
    for model in models:
        for devices in (["sim:1"], ["sim:2", "sim:3"], ["sim:1", "sim:2", "sim:3"]):
            found = pipeline_map(model, devices)
            assert set(found.values()) == set(devices)

            def device_of(name, found=found):
                return next(device for key, device in found.items() if key in ("", name) or name.startswith(key + "."))

            for number in range(5):
                names = [name for name, _ in model.model.layers[number].named_parameters()]
                assert len({device_of(f"model.layers.{number}.{name}") for name in names}) == 1
            for name, _ in [*model.named_parameters(), *model.named_buffers()]:
                device_of(name)


def test_e_18_tensor_parallel_needs_a_plan_and_dividing_heads():
    from transformers import GPT2Config, GPT2LMHeadModel

    small = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16))
    with pytest.raises(PlacementError, match="_tp_plan"):
        check_tensor_plan(small, 2)
    with pytest.raises(PlacementError, match="num_attention_heads=4.*does not divide"):
        check_tensor_plan(qwen3(), 3)
    check_tensor_plan(qwen3(), 2)
