"""Tiny models and made-up token rows for the examples of this folder."""

import torch
from torch.utils.data import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM


class TokenRows(Dataset):
    """Rows of random tokens, each with its labels."""

    def __init__(self, num_rows: int = 64, length: int = 16, vocab_size: int = 256) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, vocab_size, (num_rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.ids[index],
            "attention_mask": torch.ones_like(self.ids[index]),
            "labels": self.ids[index],
        }


def get_train_dataset() -> TokenRows:
    """Return the rows to train on."""
    return TokenRows()


def tiny_qwen3(hidden_size: int, seed: int) -> Qwen3ForCausalLM:
    """Return a four-layer model with random weights."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=256,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=False,
        )
    )
