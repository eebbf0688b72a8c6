"""Tiny real models of other kinds than decoder-only language models with rotary embeddings."""

import torch
from torch import nn


def gpt2(seed: int = 0, **changes) -> nn.Module:
    """A GPT-2 language model; its linear layers keep the weight as [in, out] and its config has names of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    values = {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 48}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**values, **no_dropout, **changes}))


def resnet(seed: int = 0, **changes) -> nn.Module:
    """A ResNet classifier."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(seed)
    values = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "basic", "num_labels": 3}
    return ResNetForImageClassification(ResNetConfig(**{**values, **changes}))


def bert(seed: int = 0, **changes) -> nn.Module:
    """A BERT encoder."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    values = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return BertModel(BertConfig(**{**values, **changes}))
