"""TeacherPlacement checks itself, and every form of teacher_placement becomes one of three."""

import copy
import inspect
import json
import pickle
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace

import pytest

from silverspoon_kd.distributed import TeacherPlacement
from silverspoon_kd.errors import PlacementError


def test_signature_and_canonical_path():
    defaults = {name: p.default for name, p in inspect.signature(TeacherPlacement).parameters.items()}
    assert list(defaults) == ["teacher_only_devices", "strategy", "device_type", "wrap_cls"]
    assert {name: defaults[name] for name in ("strategy", "device_type", "wrap_cls")} == {
        "strategy": "pp",
        "device_type": None,
        "wrap_cls": None,
    }
    assert f"{TeacherPlacement.__module__}.{TeacherPlacement.__qualname__}" == (
        "silverspoon_kd.distributed.teacher_placement.TeacherPlacement"
    )
    assert is_dataclass(TeacherPlacement) and len(fields(TeacherPlacement)) == 4
    assert TeacherPlacement().teacher_only_devices == []


@pytest.mark.parametrize("ids", ["0,1", [True], [-1], [1.0], ["0"], None, 0, {0, 1}, [[0]]], ids=repr)
def test_a_17_bad_teacher_ids(ids):
    with pytest.raises(PlacementError, match="teacher_only_devices=.*Give") as caught:
        TeacherPlacement(ids)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("ids", [(0, 1), range(2), [0, 1]])
def test_a_17_tuples_become_lists(ids):
    assert TeacherPlacement(ids).teacher_only_devices == [0, 1]
    assert type(TeacherPlacement(ids).teacher_only_devices) is list


def test_a_17_lists_are_not_shared():
    first, second = TeacherPlacement(), TeacherPlacement()
    first.teacher_only_devices.append(7)
    assert second.teacher_only_devices == []

    given = [0, 1]
    given_cls = ["Block"]
    placement = TeacherPlacement(given, "sharded", wrap_cls=given_cls)
    others = [copy.copy(placement), copy.deepcopy(placement), replace(placement), TeacherPlacement(**asdict(placement))]
    given.append(2)
    given_cls.append("Layer")
    placement.teacher_only_devices.append(3)
    placement.wrap_cls.append("Norm")
    for other in others:
        assert (other.teacher_only_devices, other.wrap_cls) == ([0, 1], ["Block"])


def test_a_10_repeated_teacher_id():
    with pytest.raises(PlacementError, match="contains 0 more than once"):
        TeacherPlacement([0, 0])


@pytest.mark.parametrize("placement", [TeacherPlacement(), TeacherPlacement([2, 0], "sharded", "xpu", ["A", "B"])])
def test_equality_copies_pickle_and_asdict(placement):
    for other in (copy.copy(placement), copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):
        assert other == placement and other is not placement
    assert TeacherPlacement(**json.loads(json.dumps(asdict(placement)))) == placement
    assert placement != TeacherPlacement([5])


def test_fields_cannot_be_set():
    with pytest.raises(FrozenInstanceError):
        TeacherPlacement([0]).strategy = "tp"


@pytest.mark.parametrize("strategy", ["shraded", "PP", "", None, ["pp"]], ids=repr)
def test_unknown_strategy(strategy):
    with pytest.raises(PlacementError, match="Give 'pp', 'tp' or 'sharded'"):
        TeacherPlacement([0], strategy)
    with pytest.raises(PlacementError, match="Did you mean 'sharded'"):
        TeacherPlacement([0], "shraded")


def test_a_24_device_types():
    assert [TeacherPlacement([0], device_type=t).device_type for t in (None, "cuda", "CUDA", "npu", "xpu", "cpu")] == [
        None,
        "cuda",
        "cuda",
        "npu",
        "xpu",
        "cpu",
    ]
    assert TeacherPlacement([0]).resolved_device_type == "cuda"
    assert TeacherPlacement([0], device_type="cpu").resolved_device_type == "cpu"
    for unknown in ("tpu", "", 0, ["cuda"]):
        with pytest.raises(PlacementError, match=r"is not supported. Give one of 'cuda', 'npu', 'xpu', 'cpu'"):
            TeacherPlacement([0], device_type=unknown)


def test_e_04_wrap_cls():
    def wrap(value, strategy="sharded"):
        return TeacherPlacement([0], strategy, wrap_cls=value).wrap_cls

    assert wrap("LlamaDecoderLayer") == "LlamaDecoderLayer"
    assert wrap(["Block", "Layer"]) == ["Block", "Layer"]
    assert wrap(("Block", "Layer")) == ["Block", "Layer"]
    assert wrap([]) is None and wrap([], "pp") is None
    for bad in ("", [1], ["Block", ""], 3):
        with pytest.raises(PlacementError, match="neither a class name nor a list"):
            wrap(bad)
    for strategy in ("pp", "tp"):
        with pytest.raises(PlacementError, match=f"strategy='{strategy}' does not use FSDP"):
            wrap("Block", strategy)


FIELDS = {"teacher_only_devices": [0, 1], "strategy": "tp"}


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, "replicated"),
        ("replicated", "replicated"),
        ("sharded", "sharded"),
        (" sharded ", "sharded"),
        (TeacherPlacement([0, 1], "tp"), TeacherPlacement([0, 1], "tp")),
        (FIELDS, TeacherPlacement([0, 1], "tp")),
        (json.dumps(FIELDS), TeacherPlacement([0, 1], "tp")),
        ({}, TeacherPlacement()),
        ('{"teacher_only_devices": [3], "device_type": null}', TeacherPlacement([3])),
    ],
    ids=repr,
)
def test_from_value(value, wanted):
    assert TeacherPlacement.from_value(value) == wanted
    assert TeacherPlacement.from_value(TeacherPlacement.from_value(value)) == wanted


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("shard", "Did you mean 'sharded'"),
        ("pp", r"needs devices of its own. Give TeacherPlacement\(teacher_only_devices=\[...\], strategy='pp'\)"),
        ('{"teacher_only_devices": [0', "is not valid JSON: .*line 1 column"),
        ("[0, 1]", "is unknown"),
        ({"teacher_devices": [0]}, "no field 'teacher_devices'. Did you mean 'teacher_only_devices'"),
        ('{"teacher_only_devices": [true]}', "contains True"),
        ({1: 2}, "no field 1"),
        ([0, 1], "is a list. Give None, 'replicated'"),
        (True, "is a bool"),
    ],
    ids=repr,
)
def test_from_value_refuses(value, words):
    with pytest.raises(PlacementError, match=words):
        TeacherPlacement.from_value(value)
