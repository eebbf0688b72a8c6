"""Blockwise: what each block is given, and where its gradient goes."""

import pytest
import torch
import transformers
from torch import nn
from transformers import TrainerCallback

from parity.cases import ACCUMULATED, ONE, VOCABULARY, Case, Collate, ParityRows
from parity.runs import build
from silverspoon_kd import create_alignments
from support.tiny import PAD, llama, qwen3

EXACT = 1e-6
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
QUIET = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "initializer_range": 0.2, "attn_implementation": "eager"}


def seeded(kind, config, **changes):
    def model(seed):
        torch.manual_seed(seed)
        return getattr(transformers, kind)(getattr(transformers, config)(**QUIET, **changes))

    return model


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": (lambda seed: llama(seed, layers=3, initializer_range=0.2), r"model\.layers\.\d+"),
    "qwen3": (lambda seed: qwen3(seed, layers=3, initializer_range=0.2), r"model\.layers\.\d+"),
    "gpt2": (
        seeded(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        r"transformer\.h\.\d+",
    ),
    "bert": (
        seeded("BertForMaskedLM", "BertConfig", intermediate_size=64, **NO_DROPOUT, **SIZES),
        r"bert\.encoder\.layer\.\d+",
    ),
    "bloom": (seeded("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=3, n_head=4), r"transformer\.h\.\d+"),
    "mixtral": (
        seeded(
            "MixtralForCausalLM",
            "MixtralConfig",
            intermediate_size=48,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            **SIZES,
        ),
        r"model\.layers\.\d+",
    ),
}


class Watch:
    """A mean squared error that keeps what it is given of each block."""

    def __init__(self):
        self.student, self.valid = [], []

    def __call__(self, student, teacher, mask):
        self.student.append(student.detach())
        self.valid.append(mask)
        return (student - teacher)[mask].square().mean()


def first(output):
    return output[0] if isinstance(output, tuple) else output


def full_forward(model, batch, names):
    """What each block is called with, and what it returns, in a forward of the whole model."""
    calls = {}

    def keep(name):
        return lambda module, args, kwargs, output: calls.update({name: (args, kwargs, first(output))})

    handles = [model.get_submodule(name).register_forward_hook(keep(name), with_kwargs=True) for name in names]
    with torch.no_grad():
        model(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def hidden_states(args, kwargs):
    return args[0] if args else kwargs["hidden_states"]


def called_on(module, hidden, args, kwargs):
    """Call a block with other hidden states and all else as the model passed it."""
    with torch.no_grad():
        if args:
            return first(module(hidden, *args[1:], **kwargs))
        return first(module(**{**kwargs, "hidden_states": hidden}))


def one_step(name, batch, tmp_path, same=False):
    """One blockwise forward: the student, the loss, what was seen of each block, and the names of the blocks."""
    make, pattern = MODELS[name]
    teacher, student, watch = make(0), make(0 if same else 1), Watch()
    case = Case(name, "blockwise", modules=pattern)
    alignments = create_alignments(teacher, student, pattern, watch, output_selector_index=0)
    options = {"alignments": alignments, "teacher": teacher, "student": student, "rows": ParityRows(4)}
    distiller = build(case, ONE, tmp_path, **options)
    loss = distiller.compute_loss(distiller.root.train(), batch)
    return student, loss, watch, [each.student_module_name for each in alignments]


BATCH = Collate(left=3, right=2)(ParityRows(4).rows)
OTHER_PADDING = Collate(left=3, right=2, padding_token=7)(ParityRows(4).rows)


@pytest.mark.parametrize("name", MODELS)
def test_f_08_each_block_computes_what_it_computes_in_a_full_forward(name, tmp_path):
    student, loss, watch, names = one_step(name, BATCH, tmp_path)
    # Models of the same weights that no distiller has seen.
    teacher, fresh = (MODELS[name][0](seed) for seed in (0, 1))
    taught, own = full_forward(teacher, BATCH, names), full_forward(fresh, BATCH, names)
    valid = BATCH["attention_mask"].bool()
    values = []
    for block, seen, mask in zip(names, watch.student, watch.valid, strict=True):
        args, kwargs, _ = own[block]
        teacher_args, teacher_kwargs, target = taught[block]
        hidden = hidden_states(teacher_args, teacher_kwargs)
        expected = called_on(fresh.get_submodule(block), hidden, args, kwargs)
        assert torch.equal(mask, valid)
        torch.testing.assert_close(seen[valid], expected[valid], rtol=EXACT, atol=EXACT)
        assert (expected - own[block][2])[valid].abs().max() > 1e-2 or block == names[0]  # not its own input
        values.append((expected - target)[valid].double().square().mean().item())
    assert loss.item() == pytest.approx(sum(values), rel=1e-5)
    loss.backward()
    for block in names:
        slopes = [each.grad for each in student.get_submodule(block).parameters()]
        assert all(slope is not None and torch.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("name", MODELS)
def test_f_08_padding_is_masked_in_each_block(name, tmp_path):
    _, _, watch, names = one_step(name, BATCH, tmp_path)
    _, _, other, _ = one_step(name, OTHER_PADDING, tmp_path)
    valid = BATCH["attention_mask"].bool()
    assert len(watch.student) == len(names) == 3
    for one, two in zip(watch.student, other.student, strict=True):
        torch.testing.assert_close(one[valid], two[valid], rtol=EXACT, atol=EXACT)
    # Without the mask the two batches do differ, so the equality above says something.
    student = MODELS[name][0](1)
    bare = [{"input_ids": batch["input_ids"]} for batch in (BATCH, OTHER_PADDING)]
    one, two = (full_forward(student, batch, names)[names[-1]][2] for batch in bare)
    assert (one - two)[valid].abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_f_08_a_copy_of_the_teacher_has_no_loss(name, tmp_path):
    _, loss, watch, names = one_step(name, BATCH, tmp_path, same=True)
    own = full_forward(MODELS[name][0](0), BATCH, names)
    valid = BATCH["attention_mask"].bool()
    assert loss.item() < 1e-10
    for block, seen in zip(names, watch.student, strict=True):
        torch.testing.assert_close(seen[valid], own[block][2][valid], rtol=EXACT, atol=EXACT)


def change(block):
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def losses_of(kind, tmp_path):
    """The loss of each block of a student that is the teacher but for block 1."""
    make, pattern = MODELS["qwen3"]
    teacher, student = make(0), make(0)
    change(student.model.layers[1])
    alignments = create_alignments(teacher, student, pattern, output_selector_index=0)
    case = Case("one_block", kind, modules=pattern)
    options = {"alignments": alignments, "teacher": teacher, "student": student, "rows": ParityRows(4)}
    distiller = build(case, ONE, tmp_path, max_steps=1, **options)
    distiller.train()
    logged = distiller.state.log_history[0]
    return [logged[f"loss/model.layers.{index}"] for index in range(3)]


def test_f_09_each_block_is_given_the_teachers_input(tmp_path):
    before, changed, after = losses_of("blockwise", tmp_path)
    assert (before, after) == (0.0, 0.0)
    assert changed > 1e-3


def test_f_09_all_blocks_together_hand_the_difference_on(tmp_path):
    before, changed, after = losses_of("holistic", tmp_path)
    assert before == 0.0
    assert changed > 1e-3
    assert after > 1e-3


class OwnForward(TrainerCallback):
    """Use the student between steps, as one does to look at samples."""

    def __init__(self):
        self.logits = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        batch = {key: BATCH[key] for key in ("input_ids", "attention_mask")}
        copied = MODELS["qwen3"][0](0)
        copied.load_state_dict(model.student.state_dict())
        with torch.no_grad():
            self.logits.append([each(**batch, use_cache=False).logits for each in (model.student, copied)])


@pytest.mark.parametrize("kind", ["blockwise", "holistic"])
def test_f_09_callbacks_see_the_student_without_the_teachers_inputs(kind, tmp_path):
    make, pattern = MODELS["qwen3"]
    teacher, student, callback = make(0), make(1), OwnForward()
    alignments = create_alignments(teacher, student, pattern, output_selector_index=0)
    case = Case("callback", kind, modules=pattern, steps=2)
    options = {"alignments": alignments, "teacher": teacher, "student": student}
    distiller = build(case, ACCUMULATED, tmp_path, activation_checkpointing=True, **options)
    distiller.add_callback(callback)
    distiller.train()
    assert len(callback.logits) == 2
    assert all(torch.equal(one, other) for one, other in callback.logits)


@pytest.mark.parametrize("hidden", [32, 24], ids=["same", "narrow"])
@pytest.mark.parametrize("block", range(3))
def test_f_09_the_gradient_of_a_block_stays_in_the_block(block, hidden, tmp_path):
    make, pattern = MODELS["qwen3"]
    teacher, student = make(0), qwen3(1, layers=3, hidden=hidden)
    alignments = create_alignments(teacher, student, pattern, output_selector_index=0)
    for index, alignment in enumerate(alignments):
        alignment.loss_weight = float(index == block)
    case = Case("one_loss", "blockwise", modules=pattern)
    options = {"alignments": alignments, "teacher": teacher, "student": student, "rows": ParityRows(4)}
    distiller = build(case, ONE, tmp_path, **options)
    distiller.compute_loss(distiller.root.train(), BATCH).backward()
    reached = {
        name
        for name, parameter in distiller.root.named_parameters()
        if parameter.grad is not None and torch.count_nonzero(parameter.grad)
    }
    own = {f"student.model.layers.{block}.{name}" for name, _ in student.model.layers[block].named_parameters()}
    projectors: nn.Module = distiller.root.projectors[block]
    assert reached == own | {f"projectors.{block}.{name}" for name, _ in projectors.named_parameters()}
    assert len(list(projectors.parameters())) == (0 if hidden == 32 else 4)
