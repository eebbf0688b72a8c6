"""Tiny real models of many architectures, in float64, with ragged batches and by-hand masks of what counts in them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from support.tiny import PAD, Rows, collate, llama, qwen3

Batch = Mapping[str, Tensor]
TEXT = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Architecture:
    """What a test needs to know of one kind of model.

    Attributes:
        build: seed and changes -> a model.
        pattern: of the aligned modules.
        later: beginnings of the names of parameters behind all aligned modules.
        rows: the four rows of the one batch that is trained on again and again.
        valid: the batch and a student module -> the positions ``[batch, length]`` whose features count, None for all.
        targets: logits of both sides and the batch -> what of them is compared, ``[positions, vocabulary]``.
        narrow: changes that make a student of another width.
        own_loss: the model computes a loss of its own from labels.
    """

    build: Callable[..., nn.Module]
    pattern: str
    later: tuple[str, ...]
    rows: Callable[[], list[dict[str, Tensor]]]
    valid: Callable[[Batch, str], Tensor | None]
    targets: Callable[[Tensor, Batch], Tensor]
    narrow: Mapping[str, Any] = field(default_factory=dict)
    own_loss: bool = True

    def batch(self) -> dict[str, Tensor]:
        """The batch."""
        return collate(self.rows())

    def pair(self, narrow: bool = False) -> tuple[nn.Module, nn.Module]:
        """Teacher and student in float64, with different weights."""
        return self.build(0).double(), self.build(1, **(self.narrow if narrow else {})).double()


# --- models ----------------------------------------------------------------------------------------------------------


def _seeded(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def seeded(seed: int, **changes: Any) -> nn.Module:
        torch.manual_seed(seed)
        return build(**changes)

    return seeded


def _from_config(model: str, config: str, **values: Any) -> Callable[..., nn.Module]:
    @_seeded
    def build(**changes: Any) -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, config)(**{**values, **changes}))

    return build


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**TEXT, **NO_DROPOUT, "max_position_embeddings": 32}

bert = _from_config("BertForMaskedLM", "BertConfig", **BERT)
bert_classifier = _from_config("BertForSequenceClassification", "BertConfig", **BERT, num_labels=3)
albert = _from_config(
    "AlbertForMaskedLM",
    "AlbertConfig",
    **{**BERT, "num_hidden_layers": 3},
    embedding_size=8,
    num_hidden_groups=1,
    classifier_dropout_prob=0.0,
)
gpt2 = _from_config(
    "GPT2LMHeadModel",
    "GPT2Config",
    vocab_size=64,
    n_embd=16,
    n_layer=2,
    n_head=2,
    n_positions=32,
    bos_token_id=1,
    eos_token_id=1,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
bloom = _from_config("BloomForCausalLM", "BloomConfig", vocab_size=64, hidden_size=16, n_layer=2, n_head=2)
mixtral = _from_config(
    "MixtralForCausalLM",
    "MixtralConfig",
    **TEXT,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=32,
    pad_token_id=PAD,
    # The others do not compute in float64.
    experts_implementation="eager",
)
t5 = _from_config(
    "T5ForConditionalGeneration",
    "T5Config",
    vocab_size=64,
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
    dropout_rate=0.0,
    # At the default of 1 the hidden states of a tiny model are so large that SGD runs away.
    initializer_factor=0.3,
)
vit = _from_config(
    "ViTForImageClassification",
    "ViTConfig",
    **{key: value for key, value in TEXT.items() if key != "vocab_size"},
    **NO_DROPOUT,
    image_size=16,
    patch_size=8,
    num_labels=3,
)
resnet = _from_config(
    "ResNetForImageClassification",
    "ResNetConfig",
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    layer_type="basic",
    num_labels=3,
)


class Tagger(nn.Module):
    """A plain module over token ids with its own loss: labels ``[batch, length]``, not shifted."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        output = {"logits": self.head(hidden)}
        if labels is not None:
            output["loss"] = functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())
        return output


class Perceptron(nn.Module):
    """A plain module over vectors that returns bare logits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width))
        self.head = nn.Linear(width, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(features)))


# --- batches ---------------------------------------------------------------------------------------------------------


def text_rows(**columns: Callable[[dict[str, Tensor]], Tensor]) -> list[dict[str, Tensor]]:
    """Four ragged rows of tokens; ``columns`` are made from each row."""
    return [{**row, **{name: make(row) for name, make in columns.items()}} for row in Rows(4)]


def _masked_labels(row: dict[str, Tensor]) -> Tensor:
    """A label at every third position, padding included, as a careless collator makes them."""
    kept = torch.arange(len(row["input_ids"])) % 3 == 1
    return row["input_ids"].masked_fill(~kept, -100)


def _tags(row: dict[str, Tensor]) -> Tensor:
    return (row["input_ids"] % 5).masked_fill(row["attention_mask"] == 0, -100)


def _class(row: dict[str, Tensor]) -> Tensor:
    return row["input_ids"].sum() % 3


def translation_rows() -> list[dict[str, Tensor]]:
    """Source and target of the same padded length; no decoder ids, no decoder mask: the labels say all."""
    targets = Rows(4, low=2, high=9, seed=7)
    return [
        {
            "input_ids": source["input_ids"],
            "attention_mask": source["attention_mask"],
            "labels": target["input_ids"].masked_fill(target["attention_mask"] == 0, -100),
        }
        for source, target in zip(Rows(4), targets, strict=True)
    ]


def image_rows() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.randn(3, 16, 16, generator=numbers, dtype=torch.float64),
            "labels": torch.tensor(index % 3),
        }
        for index in range(4)
    ]


def vector_rows() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    return [
        {"features": torch.randn(6, generator=numbers, dtype=torch.float64), "labels": torch.tensor(index % 3)}
        for index in range(4)
    ]


# --- what counts -----------------------------------------------------------------------------------------------------


def _unpadded(batch: Batch, module: str) -> Tensor:
    return batch["attention_mask"] == 1


def _unpadded_on_either_side(batch: Batch, module: str) -> Tensor:
    return batch["labels"] != -100 if module.startswith("decoder") else batch["attention_mask"] == 1


def _everything(batch: Batch, module: str) -> None:
    return None


def next_tokens(logits: Tensor, batch: Batch) -> Tensor:
    """The logits that predict a label: one position before it."""
    return logits[:, :-1][batch["labels"][:, 1:] != -100]


def labelled(logits: Tensor, batch: Batch) -> Tensor:
    """The logits at the positions of the labels."""
    return logits[batch["labels"] != -100]


def labelled_and_unpadded(logits: Tensor, batch: Batch) -> Tensor:
    return logits[(batch["labels"] != -100) & (batch["attention_mask"] == 1)]


def each_row(logits: Tensor, batch: Batch) -> Tensor:
    return logits


LAYERS = r"model\.layers\.\d+"

ARCHITECTURES = {
    "llama": Architecture(
        lambda seed, **changes: llama(seed, **{"layers": 2, "hidden": 16, **changes}),
        LAYERS,
        ("model.norm", "lm_head"),
        text_rows,
        _unpadded,
        next_tokens,
        {"hidden": 24},
    ),
    "qwen3": Architecture(
        lambda seed, **changes: qwen3(seed, **{"layers": 2, "hidden": 16, **changes}),
        LAYERS,
        ("model.norm", "lm_head"),
        text_rows,
        _unpadded,
        next_tokens,
        {"hidden": 12},
    ),
    "gpt2": Architecture(
        gpt2, r"transformer\.h\.\d+", ("transformer.ln_f",), text_rows, _unpadded, next_tokens, {"n_embd": 20}
    ),
    "mixtral": Architecture(mixtral, LAYERS, ("model.norm", "lm_head"), text_rows, _unpadded, next_tokens),
    "bert": Architecture(
        bert,
        r"bert\.encoder\.layer\.\d+",
        ("cls",),
        lambda: text_rows(labels=_masked_labels),
        _unpadded,
        labelled_and_unpadded,
        {"hidden_size": 12},
    ),
    "bert_classifier": Architecture(
        bert_classifier,
        r"bert\.encoder\.layer\.\d+",
        ("bert.pooler", "classifier"),
        lambda: text_rows(labels=_class),
        _unpadded,
        each_row,
    ),
    "albert": Architecture(
        albert,
        r"albert\.encoder\.albert_layer_groups\.0\.albert_layers\.0",
        ("predictions",),
        lambda: text_rows(labels=_masked_labels),
        _unpadded,
        labelled_and_unpadded,
    ),
    "t5": Architecture(
        t5,
        r"(encoder|decoder)\.block\.\d+",
        ("decoder.final_layer_norm",),
        translation_rows,
        _unpadded_on_either_side,
        labelled,
        {"d_model": 12},
    ),
    "vit": Architecture(
        vit,
        r"vit\.layers\.\d+",
        ("vit.layernorm", "classifier"),
        image_rows,
        _everything,
        each_row,
        {"hidden_size": 12},
    ),
    "resnet": Architecture(
        resnet,
        r"resnet\.encoder\.stages\.\d+",
        ("classifier",),
        image_rows,
        _everything,
        each_row,
        {"hidden_sizes": [6, 12]},
    ),
    "module_with_dict_batches": Architecture(
        _seeded(Tagger), r"blocks\.\d+", ("head",), lambda: text_rows(labels=_tags), _unpadded, labelled, {"width": 12}
    ),
    "module_with_tuple_batches": Architecture(
        _seeded(Perceptron), "inner", ("head",), vector_rows, _everything, each_row, {"width": 12}, own_loss=False
    ),
}
