"""What the parity tests run: distillers x projectors x alpha, and the ways of dividing the rows of a step."""

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import OPTConfig, OPTForCausalLM, Qwen3ForCausalLM

from support.tiny import PAD, qwen3

VOCABULARY = 64
MOVED = 1e-3  # the least relative movement of the weights for which an equality means something


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        name: for test ids and files.
        distiller: "response", "holistic" or "blockwise".
        student: a name of STUDENTS; all but "narrow" have the teacher's width.
        alpha: share of the student's own loss.
        learning_rate: of plain SGD, large, so that the weights really move.
        loss_weight: of each alignment, so that features are heard beside the student's own loss.
        modules: the aligned modules.
        equal_rows: all rows have one length and all their labels count.
        steps: number of optimizer steps.
        arguments: further TrainingArguments.
    """

    name: str
    distiller: str
    student: str = "same"
    alpha: float = 0.0
    learning_rate: float = 1.0
    loss_weight: float = 1.0
    modules: str = r"model\.layers\.[02]"
    equal_rows: bool = False
    steps: int = 4
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """How the rows of one step are divided: ranks x accumulation x batch."""

    batch: int
    accumulation: int = 1
    ranks: int = 1

    @property
    def name(self) -> str:
        """For test ids and files."""
        return f"{self.ranks}x{self.accumulation}x{self.batch}"


ONE = Layout(batch=4)
ACCUMULATED = Layout(batch=2, accumulation=2)
RANKS = Layout(batch=2, ranks=2)
BOTH = Layout(batch=1, accumulation=2, ranks=2)

PARITY_CASES = [
    Case("response", "response", learning_rate=2.0),
    Case("response-task", "response", alpha=0.5, learning_rate=0.5),
    Case("response-narrow", "response", "narrow", learning_rate=2.0),
    Case("response-narrow-task", "response", "narrow", alpha=0.5, learning_rate=0.5),
    Case("response-mean_loss-task", "response", "mean_loss", alpha=0.5, learning_rate=0.5),
    Case("holistic", "holistic", learning_rate=2.0),
    Case("holistic-task", "holistic", alpha=0.5, learning_rate=0.2, loss_weight=10.0),
    Case("holistic-narrow", "holistic", "narrow", learning_rate=2.0),
    Case("holistic-narrow-task", "holistic", "narrow", alpha=0.5, learning_rate=0.2, loss_weight=10.0),
    Case("holistic-mean_loss-task_only", "holistic", "mean_loss", alpha=1.0, learning_rate=0.2),
    Case("blockwise", "blockwise", learning_rate=4.0),
    Case("blockwise-task", "blockwise", alpha=0.5, learning_rate=0.2, loss_weight=10.0),
    Case("blockwise-narrow", "blockwise", "narrow", learning_rate=1.0),
    Case("blockwise-narrow-task", "blockwise", "narrow", alpha=0.5, learning_rate=0.2, loss_weight=10.0),
    Case(
        "blockwise-narrow-clipped",
        "blockwise",
        "narrow",
        alpha=0.5,
        learning_rate=2.0,
        arguments={"max_grad_norm": 0.05},
    ),
]


class ParityRows(Dataset):
    """Token rows of 4 to 12 tokens; in ragged ones many labels are -100, and one row of four has none that counts."""

    def __init__(self, num_rows: int, *, equal: bool = False, seed: int = 3) -> None:
        numbers = random.Random(seed)
        self.rows = []
        for index in range(num_rows):
            ids = [numbers.randint(1, VOCABULARY - 1) for _ in range(8 if equal else numbers.randint(4, 12))]
            left_out = 0.0 if equal else 1.0 if index % 4 == 2 else 0.4
            labels = [-100 if numbers.random() < left_out else token for token in ids]
            # Nothing predicts the first token, but behind padding on the left its label would count.
            labels[0] = -100
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]


@dataclass(frozen=True)
class Collate:
    """Pad the rows of a batch to the longest of them, and further as asked; the labels of padding are -100, or not."""

    right: int = 0
    left: int = 0
    empty_rows: int = 0
    padding_token: int = PAD
    padding_label: int = -100

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        length = max(len(row["input_ids"]) for row in rows) + self.right
        batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for row in [*rows, *[{"input_ids": [], "labels": []}] * self.empty_rows]:
            real = len(row["input_ids"])
            before, after = [1] * self.left, [1] * (length - real)
            pad, none = self.padding_token, self.padding_label
            batch["input_ids"].append([pad * i for i in before] + row["input_ids"] + [pad * i for i in after])
            batch["attention_mask"].append([0 * i for i in before] + [1] * real + [0 * i for i in after])
            batch["labels"].append([none * i for i in before] + row["labels"] + [none * i for i in after])
        return {key: torch.tensor(values) for key, values in batch.items()}


class MeanLossForCausalLM(Qwen3ForCausalLM):
    """A model whose loss is the mean over its own labels: its forward cannot be told the number of items."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None):
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": output.logits}


class NormBlock(nn.Module):
    """A block with running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.norm(self.linear(hidden).transpose(1, 2)).transpose(1, 2)


class NormModel(nn.Module):
    """A plain language model of such blocks."""

    def __init__(self, seed: int, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(NormBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return {"logits": self.head(hidden)}


def _layer_drop() -> nn.Module:
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 4}
    none = {"dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": PAD, "max_position_embeddings": 64}
    config = OPTConfig(
        vocab_size=VOCABULARY, num_attention_heads=4, layerdrop=0.5, attn_implementation="eager", **sizes, **none
    )
    return OPTForCausalLM(config)


def _qwen3(seed: int, hidden: int = 32) -> nn.Module:
    # A larger spread than usual, so that attention is far from uniform and wrong masks are seen.
    return qwen3(seed=seed, layers=3, hidden=hidden, vocab=VOCABULARY, initializer_range=0.1)


def _mean_loss() -> nn.Module:
    model = _qwen3(2)
    same = MeanLossForCausalLM(model.config)
    same.load_state_dict(model.state_dict())
    return same


STUDENTS = {
    "same": lambda: _qwen3(2),
    "narrow": lambda: _qwen3(2, hidden=24),
    "mean_loss": _mean_loss,
    "norms": lambda: NormModel(2),
    "layer_drop": _layer_drop,
}


def build_teacher(case: Case) -> nn.Module:
    """Return a frozen teacher of which someone left one parameter trainable."""
    teacher = NormModel(1) if case.student == "norms" else _qwen3(1)
    parameters = list(teacher.parameters())
    for parameter in parameters[:-1]:
        parameter.requires_grad_(False)
    return teacher


def build_student(case: Case) -> nn.Module:
    """Return the student, always the same one."""
    return STUDENTS[case.student]()


# Micro-batches of one row, so some without any label that counts.
BOTH_CASES = [
    case
    for case in PARITY_CASES
    if case.name
    in {
        "response-task",
        "response-mean_loss-task",
        "holistic",
        "holistic-narrow-task",
        "blockwise",
        "blockwise-narrow-clipped",
    }
]

# Cases for several ranks alone.
EARLY_BLOCK = [
    Case(
        f"{distiller}-early_block",
        distiller,
        modules=r"model\.layers\.0",
        learning_rate=4.0,
        steps=3,
        # Nothing may be unused: DDP would stop at the second step.
        arguments={"ddp_find_unused_parameters": False},
    )
    for distiller in ("holistic", "blockwise")
]
NORMS = [
    Case(
        f"{distiller}-norms",
        distiller,
        "norms",
        modules=r"blocks\.[02]",
        steps=2,
        arguments={"save_strategy": "steps", "save_steps": 2},
    )
    for distiller in ("response", "holistic", "blockwise")
]
LAYER_DROP = Case("response-layer_drop", "response", "layer_drop", steps=6, arguments={"gradient_checkpointing": True})
ACCUMULATION_4 = Case(
    "blockwise-accumulation_4", "blockwise", learning_rate=0.1, loss_weight=40.0, steps=2, equal_rows=True
)
# Each rank divides by its own counts: the same for rows of one length, by definition not for others.
LOCAL_MEANS = [
    Case(
        f"{distiller}-local_means",
        distiller,
        learning_rate=2.0,
        equal_rows=True,
        steps=2,
        arguments={"average_tokens_across_devices": False},
    )
    for distiller in ("response", "holistic", "blockwise")
]
RAGGED_LOCAL_MEANS = dataclasses.replace(LOCAL_MEANS[0], name="response-local_means-ragged", equal_rows=False)

RANK_RUNS = [
    *[(case, RANKS) for case in (*PARITY_CASES, *EARLY_BLOCK, *LOCAL_MEANS, RAGGED_LOCAL_MEANS, LAYER_DROP)],
    *[(case, BOTH) for case in (*BOTH_CASES, *NORMS)],
    (ACCUMULATION_4, Layout(batch=1, accumulation=4, ranks=2)),
]
