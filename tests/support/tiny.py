"""Tiny real models and ragged data for tests."""

import random

import torch
from torch import nn
from torch.utils.data import Dataset

PAD = 0


def qwen3(seed: int = 0, layers: int = 4, hidden: int = 32, vocab: int = 64, **changes) -> nn.Module:
    """A Qwen3 model; ``changes`` go to its config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    values = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        "pad_token_id": PAD,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**values, **changes}))


def llama(seed: int = 0, layers: int = 4, hidden: int = 32, vocab: int = 64, **changes) -> nn.Module:
    """A Llama model; ``changes`` go to its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    values = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
        "pad_token_id": PAD,
    }
    return LlamaForCausalLM(LlamaConfig(**{**values, **changes}))


class Rows(Dataset):
    """Token rows of different lengths, padded on the right; labels are -100 on the first two tokens and on padding."""

    def __init__(
        self,
        n: int = 32,
        vocab: int = 64,
        low: int = 5,
        high: int = 12,
        seed: int = 1,
        pad_to: int = 12,
        labels: bool = True,
    ):
        numbers = random.Random(seed)
        self.rows = []
        for _ in range(n):
            length = numbers.randint(low, high)
            ids = [numbers.randint(1, vocab - 1) for _ in range(length)]
            padding = pad_to - length
            row = {"input_ids": ids + [PAD] * padding, "attention_mask": [1] * length + [0] * padding}
            if labels:
                row["labels"] = [-100, -100, *ids[2:]] + [-100] * padding
            self.rows.append({key: torch.tensor(value) for key, value in row.items()})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack the rows."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters, fp32 on CPU."""
    return {name: parameter.detach().float().cpu().clone() for name, parameter in model.named_parameters()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance of two sets of weights."""
    assert one.keys() == other.keys()
    difference = sum(((one[name] - other[name]).double() ** 2).sum() for name in one)
    size = sum((other[name].double() ** 2).sum() for name in other)
    return float((difference / size).sqrt())


def arguments(folder, **changes):
    """TrainingArguments for a short exact run: SGD, no shuffling surprises, no clipping, everything logged."""
    from silverspoon_kd import TrainingArguments

    values = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_grad_norm": 0,
        "seed": 1,
    }
    return TrainingArguments(**{**values, **changes})
