import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.optim import clip_gradients


def _parameter(gradient, dtype=torch.float32) -> nn.Parameter:
    gradient = torch.as_tensor(gradient, dtype=dtype)
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return parameter


def _group(name, *gradients, projector=False, dtype=torch.float32):
    return {"params": [_parameter(g, dtype) for g in gradients], "alignment": name, "projector": projector}


def _random(seed, *shape, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def _grads(group):
    return [p.grad for p in group["params"]]


def _norm64(*gradients) -> float:
    return math.sqrt(sum(float(x) ** 2 for g in gradients for x in torch.as_tensor(g).double().flatten()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_i_04_norms_and_factors_equal_a_loop_in_float64(dtype):
    raw = {"a": [_random(0, 3, 4), _random(1, 5)], "b": [_random(2, 7, scale=100.0)]}
    groups = [_group("a", raw["a"][0], dtype=dtype), _group("b", *raw["b"], dtype=dtype)]
    groups.append(_group("a", raw["a"][1], dtype=dtype))
    norms = clip_gradients(groups, {"a": 1.5, "b": 2.0})
    for name, limit in (("a", 1.5), ("b", 2.0)):
        expected = _norm64(*raw[name])
        assert norms[name].item() == pytest.approx(expected, rel=1e-6)
        factor = min(1.0, limit / (expected + 1e-6))
        clipped = [g for group in groups if group["alignment"] == name for g in _grads(group)]
        for before, after in zip(raw[name], clipped, strict=True):
            torch.testing.assert_close(after.double(), before * factor, rtol=1e-6, atol=1e-7)
        assert _norm64(*clipped) <= limit * (1 + 1e-6)
    assert norms[""].item() == pytest.approx(_norm64(*raw["a"], *raw["b"]), rel=1e-6)
    assert list(norms) == ["a", "b", ""]
    assert all(norm.dim() == 0 for norm in norms.values())


def test_i_04_equals_torchs_own_clipping_of_one_alignment():
    gradients = [_random(3, 4, 4, scale=9.0).float(), _random(4, 6).float()]
    group = _group("a", *gradients)
    reference = [_parameter(g) for g in gradients]
    total = torch.nn.utils.clip_grad_norm_(reference, 0.7)
    norms = clip_gradients([group], {"a": 0.7})
    assert torch.equal(norms["a"], total)
    assert all(torch.equal(p.grad, g) for p, g in zip(reference, _grads(group), strict=True))


def test_i_04_a_large_block_does_not_starve_another():
    """SGD with rate 1: the update of block 1 is that of the run in which block 0 was not scaled by 1000."""

    def update(scale):
        groups = [_group("block 0", _random(5, 8, scale=scale)), _group("block 1", _random(6, 8))]
        clip_gradients(groups, {"block 0": 1.0, "block 1": 1.0})
        torch.optim.SGD(groups, lr=1.0).step()
        return [p.detach() for group in groups for p in group["params"]]

    plain, scaled = update(1.0), update(1000.0)
    assert torch.equal(plain[1], scaled[1])
    assert _norm64(scaled[0]) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("limits", [{}, {"a": None}, {"a": 0}, {"a": 0.0}])
def test_i_04_none_and_zero_measure_only(limits):
    gradient = _random(7, 9, scale=50.0)
    group = _group("a", gradient)
    norms = clip_gradients([group], limits)
    assert torch.equal(_grads(group)[0], gradient.float())
    assert norms["a"].item() == pytest.approx(_norm64(gradient), rel=1e-6)


def test_norm_below_the_limit_changes_nothing():
    group = _group("a", [0.3, 0.4])
    assert clip_gradients([group], {"a": 10.0})["a"].item() == pytest.approx(0.5)
    assert torch.equal(_grads(group)[0], torch.tensor([0.3, 0.4]))


def test_projectors_can_be_left_out():
    block, projector = [3.0, 4.0], [30.0, 40.0]
    groups = [_group("a", block), _group("a", projector, projector=True)]
    norms = clip_gradients(groups, {"a": 1.0}, clip_projectors=False)
    assert norms["a"].item() == pytest.approx(5.0)
    assert norms[""].item() == pytest.approx(5.0)
    assert torch.equal(_grads(groups[1])[0], torch.tensor(projector))
    assert _norm64(_grads(groups[0])[0]) == pytest.approx(1.0, rel=1e-5)

    groups = [_group("a", block), _group("a", projector, projector=True)]
    norms = clip_gradients(groups, {"a": 1.0})
    assert norms["a"].item() == pytest.approx(_norm64(block, projector))
    assert _norm64(*_grads(groups[0]), *_grads(groups[1])) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("limit", [1.0, None])
def test_a_broken_alignment_is_zeroed_and_reported(broken, limit):
    groups = [_group("bad", [1.0, broken], [2.0]), _group("good", [3.0, 4.0])]
    norms = clip_gradients(groups, {"bad": limit, "good": 10.0})
    assert all(torch.equal(g, torch.zeros_like(g)) for g in _grads(groups[0]))
    assert torch.equal(_grads(groups[1])[0], torch.tensor([3.0, 4.0]))
    assert not math.isfinite(norms["bad"].item())
    assert not math.isfinite(norms[""].item())
    assert norms["good"].item() == pytest.approx(5.0)


def test_a_broken_projector_is_zeroed_even_where_it_is_not_clipped():
    groups = [_group("a", [3.0, 4.0]), _group("a", [math.inf], projector=True), _group("b", [1.0])]
    norms = clip_gradients(groups, {"a": 1.0}, clip_projectors=False)
    assert not any(g.any() for group in groups[:2] for g in _grads(group))
    assert math.isnan(norms["a"].item())
    assert norms["b"].item() == 1.0


def test_half_precision_norms_do_not_overflow_or_round():
    gradient = torch.full((64,), 30000.0)
    groups = [_group("fp16", gradient, dtype=torch.float16), _group("bf16", _random(8, 4096), dtype=torch.bfloat16)]
    groups.append(_group("bf16", _random(9, 33)))  # fp32 beside bf16
    exact = _norm64(_grads(groups[1])[0], _grads(groups[2])[0])
    norms = clip_gradients(groups, {"fp16": 24.0, "bf16": 1.0})
    assert norms["fp16"].item() == pytest.approx(240000.0)
    torch.testing.assert_close(_grads(groups[0])[0], torch.full((64,), 3.0, dtype=torch.float16))
    assert norms["bf16"].item() == pytest.approx(exact, rel=1e-5)
    assert _norm64(_grads(groups[1])[0], _grads(groups[2])[0]) == pytest.approx(1.0, rel=3e-3)
    assert _grads(groups[1])[0].dtype == torch.bfloat16


def test_missing_gradients_count_as_nothing():
    group = _group("a", [3.0, 4.0])
    group["params"].append(nn.Parameter(torch.ones(2)))
    idle = {"params": [nn.Parameter(torch.ones(2))], "alignment": "idle", "projector": False}
    norms = clip_gradients([group, idle], {"a": 1.0, "idle": 1.0, "unknown": 1.0})
    assert norms["idle"].item() == 0.0
    assert norms["a"].item() == pytest.approx(5.0)
    assert group["params"][1].grad is None
    assert clip_gradients([], {}) == {}


def test_negative_limit_is_refused():
    with pytest.raises(ConfigurationError, match="negative"):
        clip_gradients([_group("a", [1.0])], {"a": -1.0})


class _Operators(TorchDispatchMode):
    """Records what reaches the device."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_the_host_never_reads_a_value_of_a_device():
    groups = [_group("a", [1.0, math.nan]), _group("b", [9.0]), _group("b", [2.0], projector=True)]
    for group in groups:  # on a device without values to read
        group["params"] = [nn.Parameter(parameter.detach().to("meta")) for parameter in group["params"]]
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    with _Operators() as seen:
        clip_gradients(groups, {"a": 1.0, "b": 1.0}, clip_projectors=False)
    assert "_foreach_norm" in seen.names
    assert {"_foreach_mul_", "masked_fill_"} <= seen.names
    assert not seen.names & {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_to_copy"}
