"""Who may know about devices, ranks and the Trainer."""

import pytest

from support import source_checks as checks


def test_package_uses_no_cuda_calls():
    assert checks.cuda_problems(checks.package_modules()) == []


def test_only_training_and_teacher_know_about_ranks():
    assert checks.rank_problems(checks.package_modules()) == []


def test_nothing_below_training_knows_the_trainer():
    assert checks.trainer_problems(checks.package_modules()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.synchronize()",
        "import torch as t\ndef f():\n    return t.cuda.is_available()",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "from torch.cuda.amp import autocast as a",
    ],
)
def test_finds_cuda(source):
    assert checks.cuda_problems([checks.parse("silverspoon_kd.losses.kl", source)])
    assert checks.cuda_problems([checks.parse("silverspoon_kd.device", source)]) == []


def test_cuda_in_words_and_other_attributes_is_fine():
    source = 'import torch\nif torch.device("cuda").type == "cuda":\n    """torch.cuda"""\nself.cuda.x\n'
    assert checks.cuda_problems([checks.parse("silverspoon_kd.tree", source)]) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.distributed.barrier()",
        "import torch.distributed as dist",
        "from torch import distributed",
        "def f():\n    from torch.distributed.tensor import DTensor",
    ],
)
def test_finds_ranks(source):
    assert checks.rank_problems([checks.parse("silverspoon_kd.objectives.response", source)])
    assert checks.rank_problems([checks.parse("silverspoon_kd.training.trainer", source)]) == []
    assert checks.rank_problems([checks.parse("silverspoon_kd.teacher.world", source)]) == []


def test_own_distributed_package_is_not_torchs():
    source = "from silverspoon_kd.distributed import Plan\nfrom .distributed import Plan"
    assert checks.rank_problems([checks.parse("silverspoon_kd.objectives", source, is_package=True)]) == []


@pytest.mark.parametrize(
    "source",
    [
        "from transformers import Trainer",
        "from transformers.trainer import Trainer",
        "import transformers\nx = transformers.TrainingArguments",
        "from transformers.training_args import TrainingArguments as A",
    ],
)
def test_finds_the_trainer(source):
    assert checks.trainer_problems([checks.parse("silverspoon_kd.student.root", source)])
    assert checks.trainer_problems([checks.parse("silverspoon_kd.training.arguments", source)]) == []


def test_other_parts_of_transformers_are_fine():
    source = "from transformers import PreTrainedModel\nfrom transformers.utils import ModelOutput"
    assert checks.trainer_problems([checks.parse("silverspoon_kd.student.root", source)]) == []
