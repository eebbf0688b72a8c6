"""Divergences from hidden states and heads against the formula over whole logits in float64."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import (
    OutputHead,
    fused,
    fused_divergence,
    jsd_loss,
    kl_divergence_loss,
    mse_loss,
    reverse_kl_loss,
)
from support import tiny

LOSSES = {
    "forward": lambda **options: kl_divergence_loss(**options),
    "reverse": lambda **options: reverse_kl_loss(**options),
    **{f"jsd {beta}": (lambda beta=beta, **options: jsd_loss(beta=beta, **options)) for beta in (0, 0.1, 0.5, 0.9, 1)},
}
MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]])

every_loss = pytest.mark.parametrize("name", LOSSES)


@dataclasses.dataclass
class Case:
    """Both sides; ``tensors`` are the student's hidden states, weight and bias."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    teacher: torch.Tensor
    teacher_head: OutputHead
    scale: float = 1.0
    soft_cap: float | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [each for each in (self.hidden, self.weight, self.bias) if each is not None]

    def to(self, dtype) -> "Case":
        def convert(tensor):
            return None if tensor is None else tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

        head = self.teacher_head
        return dataclasses.replace(
            self,
            **{name: convert(getattr(self, name)) for name in ("hidden", "weight", "bias", "teacher")},
            teacher_head=dataclasses.replace(head, weight=convert(head.weight), bias=convert(head.bias)),
        )


def case(*, positions=(2, 4), widths=(6, 9), sizes=(37, 40), bias=True, size=1.0, seed=0, scale=1.0, soft_cap=None):
    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * size

    generator = torch.Generator().manual_seed(seed)
    head = OutputHead(random(sizes[1], widths[1]), random(sizes[1]) if bias else None, scale, soft_cap)
    made = Case(
        random(*positions, widths[0]),
        random(sizes[0], widths[0]),
        random(sizes[0]) if bias else None,
        random(*positions, widths[1]),
        head,
        scale,
        soft_cap,
    )
    for tensor in made.tensors:
        tensor.requires_grad_()
    return made


def of_heads(loss, case, mask=None, **options):
    student_head = OutputHead(case.weight, case.bias, case.scale, case.soft_cap)
    return fused_divergence(loss, case.hidden, student_head, case.teacher, case.teacher_head, mask, **options)


def formula(name, temperature, case, mask=None):
    """The sum over whole logits, as the definition says it."""
    logits = case.hidden @ case.weight.T + (0 if case.bias is None else case.bias)
    head = case.teacher_head
    target = case.teacher @ head.weight.T + (0 if head.bias is None else head.bias)
    sides = []
    shared = min(logits.shape[-1], target.shape[-1])
    for side in (logits * case.scale, target * head.scale):
        capped = side if case.soft_cap is None else case.soft_cap * torch.tanh(side / case.soft_cap)
        sides.append((capped[..., :shared] / temperature).softmax(-1))
    q, p = sides
    beta = {"forward": 0.0, "reverse": 1.0}.get(name, float(name.split()[-1]) if name.startswith("jsd") else 0.0)
    if beta in (0, 1):
        first, second = (q, p) if beta else (p, q)
        values = (first * (first.log() - second.log())).sum(-1)
    else:
        m = beta * p + (1 - beta) * q
        values = (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)
    values = values if mask is None else values[mask.bool()]
    return temperature**2 * values.sum()


def gradients(total, case):
    return torch.autograd.grad(total, case.tensors)


def relative_errors(found, expected):
    pairs = zip(found, expected, strict=True)
    return [((ours.double() - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs]


@given(
    name=st.sampled_from(sorted(LOSSES)),
    temperature=st.sampled_from([0.5, 1.0, 2.0, 5.0]),
    positions=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    widths=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    sizes=st.sampled_from([(50, 50), (50, 53), (64, 50), (3, 2)]),
    bias=st.booleans(),
    masked=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, -1.5]),
    soft_cap=st.sampled_from([None, 2.0, 30.0]),
    chunk_bytes=st.sampled_from([1, 1000, 2000, 2**20]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_formula_over_whole_logits(name, temperature, positions, chunk_bytes, masked, seed, **options):
    exact = case(positions=tuple(positions), seed=seed, **options)
    single = exact.to(torch.float32)
    mask = None
    if masked:
        mask = torch.rand(positions, generator=torch.Generator().manual_seed(seed)) < 0.6
        mask.view(-1)[0] = True
    found = of_heads(LOSSES[name](temperature=temperature), single, mask, chunk_bytes=chunk_bytes)
    # The float32 numbers themselves, in float64: rounding the inputs is no error of the loss.
    exact = single.to(torch.float64)
    expected = formula(name, temperature, exact, mask)
    assert found.total.dtype == found.count.dtype == torch.float32
    assert found.count.item() == (math.prod(positions) if mask is None else mask.sum())
    # A divergence grows with the square of the gap between logits, whose last digit is 1e-7: small ones end there.
    floor = 2e-8 * temperature**2 * max(1, found.count.item())
    assert found.total.item() == pytest.approx(expected.item(), rel=1e-5, abs=floor)
    ours, theirs = gradients(found.total, single), gradients(expected, exact)
    for mine, right, tensor in zip(ours, theirs, single.tensors, strict=True):
        assert mine.dtype == torch.float32 and mine.shape == tensor.shape
        assert (mine.double() - right).norm() <= 1e-5 * right.norm() + 1e-6


@every_loss
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_gradient_is_right(name, soft_cap):
    loss = LOSSES[name](temperature=1.7, chunk_size=3)
    made = case(soft_cap=soft_cap, scale=0.5, widths=(3, 4), sizes=(7, 8))

    def function(hidden, weight, bias):
        return of_heads(loss, dataclasses.replace(made, hidden=hidden, weight=weight, bias=bias), MASK).total

    assert torch.autograd.gradcheck(function, tuple(made.tensors))


@every_loss
def test_agrees_with_the_loss_of_whole_logits(name):
    loss, made = LOSSES[name](temperature=2.0), case(soft_cap=None).to(torch.float32)
    head = made.teacher_head
    logits, target = made.hidden @ made.weight.T + made.bias, made.teacher @ head.weight.T + head.bias
    dense, found = loss.sum_and_count(logits, target, MASK), of_heads(loss, made, MASK)
    assert found.total.item() == pytest.approx(dense.total.item(), rel=1e-6)
    assert found.count.item() == dense.count.item() == 6
    assert max(relative_errors(gradients(found.total, made), gradients(dense.total, made))) < 2e-6


@every_loss
def test_chunks_change_nothing(name):
    made = case(positions=(3, 5)).to(torch.float32)
    results = []
    for chunk_size, chunk_bytes in ((0, 2**27), (0, 1), (0, 1500), (1, 2**27), (4, 1)):
        found = of_heads(LOSSES[name](chunk_size=chunk_size), made, chunk_bytes=chunk_bytes)
        results.append((found.total.detach(), *gradients(found.total, made)))
    for result in results[1:]:
        assert max(relative_errors(result, results[0])) < 1e-6


@every_loss
def test_close_models_have_small_exact_divergences(name):
    made = case(widths=(6, 6), sizes=(40, 40))
    nudge = torch.randn(made.teacher.shape, dtype=torch.float64)
    head = OutputHead(made.weight.detach(), made.bias.detach())
    made = dataclasses.replace(made, teacher=made.hidden.detach() + 1e-3 * nudge, teacher_head=head).to(torch.float32)
    exact = made.to(torch.float64)
    expected, found = formula(name, 1.0, exact), of_heads(LOSSES[name](), made)
    assert 0 < expected.item() < 1e-4
    assert found.total.item() == pytest.approx(expected.item(), rel=2e-3)
    assert max(relative_errors(gradients(found.total, made), gradients(expected, exact))) < 2e-3
    same = dataclasses.replace(made, teacher=made.hidden.detach())
    found = of_heads(LOSSES[name](), same)
    assert found.total.item() == 0
    assert all(grad.abs().max() < 1e-6 for grad in gradients(found.total, same))


@pytest.fixture(params=[True, False], ids=["rows are chosen", "rows are blanked"])
def both_ways_of_masking(request, monkeypatch):
    monkeypatch.setattr(fused, "_selects_rows", lambda device: request.param)


@every_loss
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf])
def test_masked_positions_do_not_matter(name, rubbish, both_ways_of_masking):
    made, results = case().to(torch.float32), []
    for value in (0.5, rubbish):
        keep = MASK.bool()[..., None]
        hidden = made.hidden.detach().where(keep, torch.tensor(value)).requires_grad_()
        spoiled = dataclasses.replace(made, hidden=hidden, teacher=made.teacher.where(keep, torch.tensor(value)))
        found = of_heads(LOSSES[name](temperature=2.0), spoiled, MASK)
        results.append((found.total.detach(), *gradients(found.total, spoiled)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    expected = formula(name, 2.0, made.to(torch.float64), MASK)
    assert results[0][0].item() == pytest.approx(expected.item(), rel=1e-5)
    exact = made.to(torch.float64)
    theirs = gradients(formula(name, 2.0, exact, MASK), exact)
    assert max(relative_errors(results[0][1:], theirs)) < 1e-5


@every_loss
def test_fully_masked_gives_0_with_zero_gradients(name, both_ways_of_masking):
    made = case().to(torch.float32)
    hidden = torch.full_like(made.hidden, torch.nan).requires_grad_()
    made = dataclasses.replace(made, hidden=hidden, teacher=torch.full_like(made.teacher, torch.nan))
    found = of_heads(LOSSES[name](), made, torch.zeros_like(MASK))
    assert found.total.item() == found.count.item() == found.mean().item() == 0
    assert all((grad == 0).all() for grad in gradients(found.mean(), made))


def test_no_positions_at_all():
    made = case(positions=(2, 0))
    found = of_heads(kl_divergence_loss(), made)
    assert found.total.item() == found.count.item() == 0
    assert [tuple(grad.shape) for grad in gradients(found.total, made)] == [(2, 0, 6), (37, 6), (37,)]


def test_a_tied_weight_learns_on_both_ways():
    loss, ids = jsd_loss(temperature=2.0), torch.tensor([[3, 1, 3, 30]])
    made, results = case(bias=False, widths=(6, 6), sizes=(40, 40)), []
    for total in (of_heads, lambda loss, case: formula("jsd 0.5", 2.0, case)):
        table = made.weight.detach().clone().requires_grad_()
        tied = dataclasses.replace(made, hidden=table[ids].tanh(), weight=table, teacher=made.teacher[:1])
        value = total(loss, tied)
        (value if isinstance(value, torch.Tensor) else value.total).backward()
        results.append(table.grad)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_what_needs_no_gradient_gets_none():
    for frozen in ({"weight"}, {"hidden"}, {"weight", "bias"}, {"hidden", "weight", "bias"}):
        made = case()
        for name in frozen:
            getattr(made, name).requires_grad_(False)
        made.teacher.requires_grad_()
        made.teacher_head.weight.requires_grad_()
        found = of_heads(reverse_kl_loss(), made)
        if len(frozen) == 3:
            assert not found.total.requires_grad
            continue
        found.total.backward()
        for name in ("hidden", "weight", "bias"):
            assert (getattr(made, name).grad is None) == (name in frozen)
        assert made.teacher.grad is made.teacher_head.weight.grad is None


class Recorder(TorchDispatchMode):
    """Records the shapes of all results that take memory."""

    def __init__(self):
        super().__init__()
        self.shapes, self.functions = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.functions.add(function.name())
        tensors = [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.shapes |= {tuple(each.shape) for each in tensors if each.device.type != "meta"}
        return result


@every_loss
@pytest.mark.parametrize("size", [2**18, 100])
def test_no_more_than_a_chunk_of_logits_exists(name, size, monkeypatch):
    monkeypatch.setitem(fused.SLICE_ELEMENTS, "cpu", size)
    made = case(positions=(5, 10), sizes=(201, 201), widths=(6, 5))
    with Recorder() as recorder:
        of_heads(LOSSES[name](), made, chunk_bytes=7 * 201 * 16).total.backward()
    assert max(shape[0] for shape in recorder.shapes if shape[1:] == (201,)) == 7
    assert max(map(math.prod, recorder.shapes)) == 7 * 201


def test_without_gradients_there_are_no_sums_of_them():
    made = case(sizes=(201, 201), widths=(5, 7))
    with Recorder() as recorder, torch.no_grad():
        assert not of_heads(kl_divergence_loss(), made).total.requires_grad
    assert not any(function.startswith("aten::zeros_like") for function in recorder.functions)


def test_the_backward_can_be_repeated_and_scaled():
    made = case().to(torch.float32)
    total = of_heads(kl_divergence_loss(), made).total
    first = torch.autograd.grad(total, made.tensors, retain_graph=True)
    second = torch.autograd.grad(total * -3.0, made.tensors)
    for once, scaled in zip(first, second, strict=True):
        torch.testing.assert_close(once * -3.0, scaled)
    # What left the graph is the caller's own.
    first[1].zero_()
    assert second[1].abs().sum() > 0


@given(
    name=st.sampled_from(sorted(LOSSES)),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    soft_cap=st.sampled_from([None, 10.0]),
    seed=st.integers(0, 2**31),
)
def test_half_precision_is_never_nan(name, size, dtype, soft_cap, seed):
    made = case(size=size, soft_cap=soft_cap, seed=seed).to(dtype)
    found = of_heads(LOSSES[name](temperature=2.0), made, MASK)
    grads = gradients(found.total, made)
    assert found.total.dtype == torch.float32 and {grad.dtype for grad in grads} == {dtype}
    assert found.total.item() >= 0
    assert all(grad.isfinite().all() for grad in (found.total, *grads))


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(name, dtype):
    made = case(positions=(8, 16), sizes=(300, 300)).to(dtype)
    found = of_heads(LOSSES[name](temperature=2.0, chunk_size=16), made)
    exact = made.to(torch.float64)
    expected = formula(name, 2.0, exact)
    assert found.total.item() == pytest.approx(expected.item(), rel=3e-3)
    assert max(relative_errors(gradients(found.total, made), gradients(expected, exact))) < 1e-2


def test_float16_gradients_below_its_range_survive_until_the_loss_scale():
    made, scale = case(positions=(1, 4), size=1.6, sizes=(300, 300)).to(torch.float16), 2.0**14
    exact = made.to(torch.float64)
    found = gradients(of_heads(jsd_loss(), made).total * scale, made)[1].double()
    expected = gradients(formula("jsd 0.5", 1.0, exact) * scale, exact)[1]
    tiny = (expected.abs() < 2e-8 * scale) & (expected.abs() > 1e-5)
    assert tiny.sum() > 100
    assert max(relative_errors([found[tiny]], [expected[tiny]])) < 0.05


def test_under_autocast_the_products_run_in_its_dtype():
    made = case().to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = of_heads(kl_divergence_loss(), made)
        ours = gradients(found.total, made)
    half = made.to(torch.bfloat16)
    expected = of_heads(kl_divergence_loss(), half)
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-6)
    assert {grad.dtype for grad in ours} == {torch.float32}
    assert max(relative_errors(ours, [grad.double() for grad in gradients(expected.total, half)])) < 1e-2


@every_loss
def test_ruled_out_tokens_stay_out(name):
    made = case(sizes=(40, 40)).to(torch.float64)
    made.bias.data[[3, 5]] = -torch.inf
    made.teacher_head.bias[[3, 5]] = -torch.inf
    kept = [at for at in range(40) if at not in (3, 5)]
    head = OutputHead(made.teacher_head.weight[kept], made.teacher_head.bias[kept])
    without = dataclasses.replace(made, weight=made.weight[kept], bias=made.bias[kept], teacher_head=head)
    found = of_heads(LOSSES[name](), made)
    assert found.total.item() == pytest.approx(formula(name, 1.0, without).item(), rel=1e-12)
    grads = gradients(found.total, made)
    assert all(grad.isfinite().all() for grad in grads) and (grads[1][[3, 5]] == 0).all()


@every_loss
def test_certain_models_give_finite_numbers(name):
    made = case(size=30.0, bias=False).to(torch.float32)
    found = of_heads(LOSSES[name](), made)
    assert all(grad.isfinite().all() for grad in (found.total, *gradients(found.total, made)))
    # Probabilities of 0 in float64 are too much for the formula.
    exact, head = made.to(torch.float64), made.teacher_head.weight.double()
    dense = LOSSES[name]().sum_and_count(exact.hidden @ exact.weight.T, exact.teacher @ head.T)
    assert found.total.item() == pytest.approx(dense.total.item(), rel=1e-4)


@pytest.mark.parametrize("beta", [1e-12, 1 - 1e-12])
def test_mixtures_next_to_one_side_are_finite(beta):
    made = case(size=5.0).to(torch.float32)
    found = of_heads(jsd_loss(beta=beta), made)
    assert found.total.item() == pytest.approx(0, abs=1e-4)
    assert all(grad.isfinite().all() for grad in gradients(found.total, made))


def test_nothing_waits_for_the_device():
    # A tensor on "meta" has no values, so asking for one is an error.
    made = case()
    hidden, weight, bias, teacher = (each.detach().to("meta") for each in (*made.tensors, made.teacher))
    head = OutputHead(made.teacher_head.weight.to("meta"))
    student_head = OutputHead(weight.requires_grad_(), bias)
    total = fused_divergence(jsd_loss(), hidden.requires_grad_(), student_head, teacher, head, MASK.to("meta")).total
    total.backward()
    assert weight.grad.device.type == total.device.type == "meta"


def test_inputs_that_do_not_belong_together_are_refused():
    made, loss = case(), kl_divergence_loss()
    with pytest.raises(LossError, match=r"student's hidden states \[2, 4, 5\] do not fit its head \[37, 6\]"):
        of_heads(loss, dataclasses.replace(made, hidden=made.hidden[..., :5]))
    with pytest.raises(LossError, match=r"teacher's hidden states \[9\] do not|student's tensor"):
        of_heads(loss, dataclasses.replace(made, teacher=made.teacher[0, 0]))
    with pytest.raises(LossError, match="no padding"):
        of_heads(loss, dataclasses.replace(made, weight=made.weight[:10], bias=made.bias[:10]))
    with pytest.raises(LossError, match=r"teacher's hidden states are on meta.*on cpu"):
        of_heads(loss, dataclasses.replace(made, teacher=made.teacher.to("meta")))
    with pytest.raises(LossError, match="mask"):
        of_heads(loss, made, MASK.float())
    with pytest.raises(LossError, match="chunk_bytes=0"):
        of_heads(loss, made, chunk_bytes=0)
    with pytest.raises(LossError, match="mse cannot be computed without logits"):
        of_heads(mse_loss(), made)
    weight = made.weight
    for options, message in [
        ({"weight": weight[0]}, "matrix"),
        ({"weight": weight, "bias": weight}, "bias"),
        ({"weight": weight, "scale": 0.0}, "scale=0.0"),
        ({"weight": weight, "soft_cap": 0.0}, "soft_cap=0.0"),
    ]:
        with pytest.raises(LossError, match=message):
            OutputHead(**options)


def test_runs_as_the_forward_of_a_models_own_head():
    """Returned in place of the logits the sum goes through all that hooks of a wrapper see of the head."""
    student, teacher = tiny.qwen3(seed=1, layers=2), tiny.qwen3(seed=2, layers=2, hidden=48)
    ids, mask, loss = torch.randint(0, 32, (2, 5)), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]), jsd_loss()
    with torch.no_grad():
        target = teacher.model(input_ids=ids).last_hidden_state
    head, seen, results = student.lm_head, [], []
    head.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))

    def of_hidden(hidden):
        theirs = OutputHead(teacher.lm_head.weight)
        found = fused_divergence(loss, hidden, OutputHead(head.weight, head.bias), target, theirs, mask)
        return found.total.view(1, 1, 1)

    for fused_forward in (True, False):
        if fused_forward:
            head.forward = of_hidden
            total = student(input_ids=ids).logits.sum()
            del head.forward
        else:
            total = loss.sum_and_count(student(input_ids=ids).logits, teacher.lm_head(target).detach(), mask).total
        student.zero_grad()
        total.backward()
        results.append([total.detach(), *(parameter.grad.double() for parameter in student.parameters())])
    assert seen == [(1, 1, 1), (2, 5, student.config.vocab_size)]
    assert max(relative_errors(*results)) < 1e-5
