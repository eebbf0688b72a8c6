import math

import pytest
import torch

from silverspoon_kd.cli.perplexity import perplexity
from support.tiny import llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return llama(layers=2)


@pytest.fixture(scope="module")
def examples():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": row.tolist()} for row in torch.randint(1, 64, (7, 12), generator=generator)]


def by_hand(model, examples) -> float:
    """One row at a time, log-softmax in float64."""
    logs = []
    for example in examples:
        ids = example["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0].double()
        logs += [logits[i].log_softmax(-1)[ids[i + 1]].item() for i in range(len(ids) - 1)]
    return math.exp(-sum(logs) / len(logs))


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_perplexity_is_that_of_all_tokens_whatever_the_batch(model, examples, batch_size):
    assert perplexity(model, examples, batch_size=batch_size, device=CPU) == pytest.approx(
        by_hand(model, examples), rel=1e-5
    )


def test_the_model_stays_in_its_mode_and_dropout_does_not_count(examples):
    model = llama(layers=2, attention_dropout=0.5)
    model.train()
    first = perplexity(model, examples, batch_size=4, device=CPU)
    assert model.training
    assert perplexity(model.eval(), examples, batch_size=4, device=CPU) == first
    assert not model.training


def test_progress_counts_examples(model, examples):
    seen = []
    perplexity(model, examples, batch_size=3, device=CPU, on_batch=seen.append)
    assert seen == [3, 6, 7]
