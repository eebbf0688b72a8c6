import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR

from silverspoon_kd.errors import CheckpointError, ConfigurationError
from silverspoon_kd.optim import CompositeOptimizer, build_optimizer, build_parameter_groups

ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6})


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def _groups(model: nn.Sequential) -> list[dict]:
    names = {"first": "0.", "second": "2.", "student": "4."}
    pairs = list(model.named_parameters())
    owned = {name: [pair for pair in pairs if pair[0].startswith(prefix)] for name, prefix in names.items()}
    decay = {name for name, _ in pairs if name.endswith("weight")}
    return build_parameter_groups(owned, {}, learning_rate=1e-2, weight_decay=0.1, decay_names=decay)


def _momentum(groups):
    return torch.optim.SGD(groups, momentum=0.9)


def _composite(model: nn.Sequential) -> CompositeOptimizer:
    return build_optimizer(_groups(model), ADAMW, {"second": _momentum, "first": "rmsprop"})


def _train(model, optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_each_member_steps_as_it_would_alone():
    model, reference = _model(), _model()
    optimizer = _composite(model)
    groups = _groups(reference)
    alone = [
        torch.optim.RMSprop([g for g in groups if g["alignment"] == "first"]),
        torch.optim.SGD([g for g in groups if g["alignment"] == "second"], momentum=0.9),
        torch.optim.AdamW([g for g in groups if g["alignment"] == "student"], betas=(0.8, 0.95), eps=1e-6),
    ]
    _train(model, optimizer, range(4))
    for step in range(4):
        loss = reference(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        reference.zero_grad()
        loss.backward()
        for member in alone:
            member.step()
    assert torch.equal(_weights(model), _weights(reference))


def test_groups_are_the_members_own_dicts_even_after_loading():
    optimizer = _composite(_model())
    optimizer.load_state_dict(optimizer.state_dict())
    inner = [group for member in optimizer.optimizers for group in member.param_groups]
    assert all(outer is own for outer, own in zip(optimizer.param_groups, inner, strict=True))
    optimizer.param_groups[0]["lr"] = 7.0
    assert inner[0]["lr"] == 7.0


def test_state_is_a_live_view():
    model = _model()
    optimizer = _composite(model)
    assert not optimizer.state
    _train(model, optimizer, range(1))
    assert set(optimizer.state) == set(model.parameters())
    assert "momentum_buffer" in optimizer.state[model[2].weight]
    optimizer.state[model[2].weight]["momentum_buffer"].zero_()
    del optimizer.state[model[0].weight]
    assert model[0].weight not in optimizer.state
    assert len(optimizer.state) == len(list(model.parameters())) - 1
    optimizer.state[model[0].weight] = {"x": 1}
    assert optimizer.optimizers[1].state[model[0].weight] == {"x": 1}


@pytest.mark.parametrize("through_disk", [False, True])
def test_i_03_continuation_from_a_state_dict_is_bit_identical(through_disk):
    straight = _model()
    optimizer = _composite(straight)
    _train(straight, optimizer, range(3))
    saved = copy.deepcopy({"model": straight.state_dict(), "optimizer": optimizer.state_dict()})
    if through_disk:
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
    _train(straight, optimizer, range(3, 6))

    resumed = _model()
    resumed.load_state_dict(saved["model"])
    again = _composite(resumed)
    again.load_state_dict(saved["optimizer"])
    _train(resumed, again, range(3, 6))
    assert torch.equal(_weights(straight), _weights(resumed))
    assert again.state[resumed[4].weight]["step"] == 6


def test_state_dict_has_the_layout_of_one_torch_optimizer():
    model = _model()
    optimizer = _composite(model)
    _train(model, optimizer, range(1))
    state = optimizer.state_dict()
    count = len(list(model.parameters()))
    assert [i for group in state["param_groups"] for i in group["params"]] == list(range(count))
    assert set(state["state"]) == set(range(count))


@pytest.mark.parametrize("wish", [_momentum, "sgd"])
def test_state_by_parameter_name_round_trips_through_torchs_checkpoint_api(wish):
    straight, resumed = _model(), _model()
    optimizer = build_optimizer(_groups(straight), ADAMW, {"second": wish})
    _train(straight, optimizer, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(straight, optimizer))
    resumed.load_state_dict(straight.state_dict())
    again = build_optimizer(_groups(resumed), ADAMW, {"second": wish})
    set_optimizer_state_dict(resumed, again, saved)
    assert [g["alignment"] for g in again.param_groups] == [g["alignment"] for g in optimizer.param_groups]
    _train(straight, optimizer, range(3, 5))
    _train(resumed, again, range(3, 5))
    assert torch.equal(_weights(straight), _weights(resumed))


def test_pickled_composite_goes_on_alike():
    model = _model()
    optimizer = _composite(model)
    LambdaLR(optimizer, lambda step: 1.0)
    _train(model, optimizer, range(2))
    twin, twin_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    _train(model, optimizer, range(2, 4))
    _train(twin, twin_optimizer, range(2, 4))
    assert torch.equal(_weights(model), _weights(twin))


def test_closure_runs_once_with_gradients():
    model = _model()
    optimizer = _composite(model)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    before = _weights(model)
    assert optimizer.step(closure).item() == calls[0]
    assert len(calls) == 1
    assert not torch.equal(before, _weights(model))


def test_zero_grad_reaches_all_members():
    model = _model()
    optimizer = _composite(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_step_hooks_run_once():
    model = _model()
    optimizer = _composite(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    _train(model, optimizer, range(1))
    assert calls == ["before", "after"]


def test_modes_reach_the_members_that_have_them():
    class Moded(torch.optim.SGD):
        mode = "unset"

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    model = _model()
    optimizer = build_optimizer(_groups(model), ADAMW, {"first": Moded})
    optimizer.eval()
    assert optimizer.optimizers[1].mode == "eval"
    optimizer.train()
    assert optimizer.optimizers[1].mode == "train"


def test_add_param_group_is_refused():
    with pytest.raises(ConfigurationError, match="cannot be added to a composite"):
        _composite(_model()).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_shared_parameter_is_refused():
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigurationError, match="stepped"):
        CompositeOptimizer([torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([weight], lr=1.0)])


class _RecordingScaler(torch.amp.GradScaler):
    """A real scaler that counts."""

    def __init__(self):
        super().__init__("cpu", init_scale=1024.0, growth_interval=1)
        self.calls = []

    def unscale_(self, optimizer):
        self.calls.append("unscale_")
        return super().unscale_(optimizer)

    def step(self, optimizer, *args, **kwargs):
        self.calls.append("step")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        self.calls.append("update")
        return super().update(new_scale)


def _count_steps(optimizer: CompositeOptimizer) -> list[str]:
    steps = []
    for member in optimizer.optimizers:
        member.register_step_post_hook(lambda member, *_: steps.append(type(member).__name__))
    return steps


def test_i_05_scaler_unscales_steps_and_updates_once():
    model, reference = _model(), _model()
    optimizer, plain = _composite(model), _composite(reference)
    steps = _count_steps(optimizer)
    scaler = _RecordingScaler()
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    reference(torch.ones(3, 4)).sum().backward()
    plain.step()
    assert scaler.calls == ["unscale_", "step", "update"]
    assert sorted(steps) == ["AdamW", "RMSprop", "SGD"]
    assert scaler.get_scale() == 2048.0
    assert torch.equal(_weights(model), _weights(reference))


def test_i_05_overflow_in_one_member_skips_all_and_halves_the_scale_once():
    model = _model()
    optimizer = _composite(model)
    steps = _count_steps(optimizer)
    scaler = _RecordingScaler()
    before = _weights(model)
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    model[2].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert steps == []
    assert scaler.get_scale() == 512.0
    assert torch.equal(before, _weights(model))


def test_inside_accelerate_with_scaler_and_schedule():
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    model, reference = _model(), _model()
    inner = _composite(model)
    scaler = _RecordingScaler()
    schedule = LambdaLR(inner, lambda step: 1.0 - step / 4)
    optimizer = AcceleratedOptimizer(inner, device_placement=True, scaler=scaler)
    plain = _composite(reference)
    plain_schedule = LambdaLR(plain, lambda step: 1.0 - step / 4)
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer.optimizer)
        optimizer.step()
        assert not optimizer.step_was_skipped
        schedule.step()
        plain.zero_grad()
        reference(x).square().mean().backward()
        plain.step()
        plain_schedule.step()
    assert scaler.calls == ["unscale_", "step", "update"] * 3
    assert torch.equal(_weights(model), _weights(reference))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25e-2)
    assert optimizer.state is not None
    assert set(optimizer.state) == set(model.parameters())


def test_exchanged_parameters_are_stepped():
    model = _model()
    optimizer = _composite(model)
    replaced = {p: nn.Parameter(p.detach().clone()) for p in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [replaced[p] for p in group["params"]]
    for parameter in replaced.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(not torch.equal(old, new) for old, new in replaced.items())


def test_one_wish_for_all_gives_a_plain_optimizer():
    model = _model()
    assert type(build_optimizer(_groups(model), ADAMW, {})) is torch.optim.AdamW
    every = dict.fromkeys(("first", "second", "student"), "sgd")
    assert type(build_optimizer(_groups(model), ADAMW, every)) is torch.optim.SGD


def test_same_name_shares_and_factories_do_not():
    optimizer = build_optimizer(_groups(_model()), ADAMW, {"first": "sgd", "second": "sgd"})
    assert [type(m).__name__ for m in optimizer.optimizers] == ["AdamW", "SGD"]
    optimizer = build_optimizer(_groups(_model()), ADAMW, {"first": _momentum, "second": _momentum})
    assert [type(m).__name__ for m in optimizer.optimizers] == ["AdamW", "SGD", "SGD"]


def test_alignment_called_like_an_optimizer_is_no_confusion():
    groups = _groups(_model())
    for group in groups:
        group["alignment"] = {"first": "sgd"}.get(group["alignment"], group["alignment"])
    optimizer = build_optimizer(groups, ADAMW, {"sgd": torch.optim.Adagrad, "second": "sgd"})
    found = {type(m).__name__: {g["alignment"] for g in m.param_groups} for m in optimizer.optimizers}
    assert found == {"AdamW": {"student"}, "Adagrad": {"sgd"}, "SGD": {"second"}}


def test_named_adam_takes_betas_of_the_run():
    optimizer = build_optimizer(_groups(_model()), ADAMW, {"first": "adamw_torch_fused"})
    assert optimizer.optimizers[1].defaults["betas"] == (0.8, 0.95)
    assert optimizer.optimizers[1].defaults["fused"] is True
    sgd = (torch.optim.SGD, {"lr": 1.0})
    assert build_optimizer(_groups(_model()), sgd, {"first": "adamw_torch"}).optimizers[1].defaults["eps"] == 1e-8


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"])
def test_known_names_train(name):
    model = _model()
    before = _weights(model)
    _train(model, build_optimizer(_groups(model), ADAMW, {"first": name}), range(2))
    assert not torch.equal(before, _weights(model))


def test_resolver_of_the_caller_is_used():
    optimizer = build_optimizer(
        _groups(_model()), ADAMW, {"first": "house"}, resolve=lambda name, defaults: (torch.optim.Adagrad, {"eps": 0.5})
    )
    assert optimizer.optimizers[1].defaults["eps"] == 0.5


def test_alignment_without_groups_is_left_out():
    assert type(build_optimizer(_groups(_model()), ADAMW, {"frozen": "sgd"})) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("adamw_torhc", "Did you mean 'adamw_torch'"),
        (lambda groups: None, "returned NoneType"),
        (lambda groups: torch.optim.SGD([p for g in groups for p in g["params"]], lr=1.0), "other parameter groups"),
    ],
)
def test_optimizers_that_cannot_serve_are_refused(wish, message):
    with pytest.raises(ConfigurationError, match=message):
        build_optimizer(_groups(_model()), ADAMW, {"first": wish})


@pytest.mark.parametrize("default", [(torch.optim.SGD, {"params": []}), (lambda: None, {})])
def test_defaults_that_bring_their_own_groups_are_refused(default):
    with pytest.raises(ConfigurationError, match="chooses its parameter groups itself"):
        build_optimizer(_groups(_model()), default, {})


def test_nothing_to_train_is_refused():
    with pytest.raises(ConfigurationError, match="nothing to optimize"):
        build_optimizer([], ADAMW, {})


@pytest.mark.parametrize("named", [{}, {"second": _momentum}])
def test_i_03_checkpoint_of_other_alignments_is_refused(named):
    model = _model()
    saved = build_optimizer(_groups(model), ADAMW, named).state_dict()
    here = build_optimizer(_groups(model)[:4], ADAMW, named)
    with pytest.raises(CheckpointError, match="has 6 parameter groups"):
        here.load_state_dict(saved)
    renamed = copy.deepcopy(saved)
    renamed["param_groups"][0]["alignment"] = "third"
    with pytest.raises(CheckpointError, match="'alignment': 'third'"):
        build_optimizer(_groups(model), ADAMW, named).load_state_dict(renamed)
    shorter = copy.deepcopy(saved)
    shorter["param_groups"][1]["params"].append(99)
    with pytest.raises(CheckpointError, match="with 2 parameters"):
        build_optimizer(_groups(model), ADAMW, named).load_state_dict(shorter)


@pytest.mark.parametrize("named", [{}, {"second": _momentum}])
def test_d_12_tags_survive_a_state_without_them(named):
    optimizer = build_optimizer(_groups(_model()), ADAMW, named)
    tags = [(g["alignment"], g["decay"], g["projector"]) for g in optimizer.param_groups]
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for tag in ("alignment", "decay", "projector"):
            del group[tag]
    optimizer.load_state_dict(saved)
    assert [(g["alignment"], g["decay"], g["projector"]) for g in optimizer.param_groups] == tags
