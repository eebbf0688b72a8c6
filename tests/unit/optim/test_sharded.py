"""Clipping and the composite optimizer on natively sharded parameters, against one process."""

import os
import subprocess
import sys
import textwrap

import pytest

WORLD = 2

RANK = textwrap.dedent(
    """
    import copy, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from silverspoon_kd.optim import build_optimizer, build_parameter_groups, clip_gradients

    rank, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    LIMITS = {"first": 0.05, "second": 0.02, "student": None}

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))

    def optimizer_of(module):
        pairs = list(module.named_parameters())
        owned = {n: [q for q in pairs if q[0][0] == i] for n, i in (("first", "0"), ("second", "2"), ("student", "4"))}
        groups = build_parameter_groups(owned, {}, learning_rate=1.0, weight_decay=0.0, decay_names=set())
        wish = {"second": lambda g: torch.optim.SGD(g, momentum=0.5)}
        return build_optimizer(groups, (torch.optim.AdamW, {"lr": 1.0}), wish)

    def train(module, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            module(batch).square().mean().backward()
            norms = clip_gradients(optimizer.param_groups, LIMITS)
            assert not any(isinstance(norm, DTensor) for norm in norms.values())
            optimizer.step()
        return {name: norm.item() for name, norm in norms.items()}

    def weights(module):
        return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in module.named_parameters()}

    def close(a, b):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)

    def shard(module):
        fully_shard(module[0])
        fully_shard(module[2])  # the last layer stays whole: sharded and plain gradients in one call
        assert isinstance(module[2].weight, DTensor) and module[2].weight.to_local().numel() < 15
        return module

    reference, sharded = model(), shard(model())
    plain, optimizer = optimizer_of(reference), optimizer_of(sharded)
    expected, found = train(reference, plain, range(2)), train(sharded, optimizer, range(2))
    for name, norm in expected.items():
        assert abs(found[name] - norm) < 1e-5 * max(norm, 1e-3), (name, found, expected)
    close(weights(sharded), weights(reference))

    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        saved = copy.deepcopy(get_optimizer_state_dict(sharded, optimizer, options=options))
        again = shard(model())
        again.load_state_dict(copy.deepcopy(sharded.state_dict()))
        resumed = optimizer_of(again)
        set_optimizer_state_dict(again, resumed, saved, options=options)
        assert [g["alignment"] for g in resumed.param_groups] == [g["alignment"] for g in optimizer.param_groups]
        straight = copy.deepcopy(saved), copy.deepcopy(sharded.state_dict())
        train(sharded, optimizer, range(2, 4))
        train(again, resumed, range(2, 4))
        assert all(torch.equal(a, b) for a, b in zip(weights(sharded).values(), weights(again).values()))

    # NaN on one rank's shard only: both ranks drop that alignment's gradients and keep the others.
    optimizer.zero_grad()
    sharded(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        sharded[2].weight.grad.to_local()[0, 0] = float("nan")
    kept = sharded[0].weight.grad.full_tensor().clone()
    norms = clip_gradients(optimizer.param_groups, {})
    assert norms["second"].isnan() and norms["first"].isfinite()
    assert not sharded[2].weight.grad.full_tensor().any() and not sharded[2].bias.grad.full_tensor().any()
    assert torch.equal(sharded[0].weight.grad.full_tensor(), kept) and kept.any()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads let go of tensors while Python can still be asked
    print("fine")
    """
)


@pytest.mark.multiprocess
def test_e_10_sharded_parameters_are_clipped_stepped_and_resumed_like_whole_ones(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for output in outputs:
        assert output.strip().endswith("fine"), output
