"""A class of ours is abstract or never subclassed, and only abstract methods are overridden."""

import pytest

from support import source_checks as checks

ABSTRACT = """
from abc import ABC, abstractmethod
class Objective(ABC):
    @abstractmethod
    def terms(self): ...
    def shared(self): ...
"""
CONCRETE = "class Objective:\n    def terms(self): ...\n"


def problems(base: str, derived: str) -> list[str]:
    return checks.class_problems(
        [
            checks.parse("silverspoon_kd.objectives.objective", base),
            checks.parse("silverspoon_kd.objectives.response", derived),
        ]
    )


def test_package_classes_are_abstract_or_final():
    assert checks.class_problems(checks.package_modules()) == []


@pytest.mark.parametrize(
    "derived",
    [
        "from silverspoon_kd.objectives.objective import Objective\nclass Response(Objective): ...",
        "from silverspoon_kd.objectives import Objective\nclass Response(Objective): ...",  # passed on by the package
        "from .objective import Objective as Base\nclass Response(Base): ...",
        "from . import objective\nclass Response(objective.Objective): ...",
    ],
)
def test_finds_a_subclass_of_a_concrete_class(derived):
    wanted = "silverspoon_kd.objectives.response.Response subclasses silverspoon_kd.objectives.objective.Objective"
    assert problems(CONCRETE, derived) == [f"{wanted}, which is not abstract"]
    assert problems(ABSTRACT, derived) == []


def test_finds_a_subclass_in_the_same_module():
    assert problems("", "class A:\n    x = 1\nclass B(A): ...") != []


def test_finds_an_overridden_concrete_method():
    derived = "from .objective import Objective\nclass Response(Objective):\n    def terms(self): ...\n"
    assert problems(ABSTRACT, derived) == []
    assert "overrides silverspoon_kd.objectives.objective.Objective.shared" in "".join(
        problems(ABSTRACT, derived + "    def shared(self): ...\n")
    )


def test_protocols_are_abstract():
    source = "from typing import Protocol\nclass Objective(Protocol):\n    def terms(self): ...\n"
    assert problems(source, "from .objective import Objective\nclass Response(Objective): ...") == []


def test_classes_of_others_may_be_subclassed():
    derived = "import transformers\nclass TrainingArguments(transformers.TrainingArguments): ..."
    assert problems("class TrainingArguments: ...", derived) == []


def test_errors_and_the_trainer_may_be_subclassed():
    assert (
        checks.class_problems([checks.parse("silverspoon_kd.errors", "class A(Exception): ...\nclass B(A): ...")]) == []
    )
    trainer = "class DistillationTrainer:\n    x = 1\nclass HolisticDistiller(DistillationTrainer): ..."
    assert checks.class_problems([checks.parse("silverspoon_kd.training.trainer", trainer)]) == []


def test_finds_probing_of_the_own_object():
    source = "class A:\n    def f(self):\n        return hasattr(self, 'x')\n"
    assert problems("", source) == ["silverspoon_kd.objectives.response:3 probes its own object with hasattr"]
    assert problems("", source.replace("self, 'x'", "model, 'x'")) == []
