"""Importing the package costs nothing and loads nothing, and its table of contents is complete."""

import ast
import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import silverspoon_kd
from support.fresh import environment, run_fresh

HEAVY = ["torch", "numpy", "transformers", "accelerate", "deepspeed", "safetensors", "cloudpickle"]
IMPORTS = [
    "import silverspoon_kd",
    "from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu",
    "from silverspoon_kd import TeacherPlacement, setup_split_gpu, PlacementError, __version__",
    "from silverspoon_kd.distributed import TeacherPlacement, resolve_plan; "
    "resolve_plan(distiller='hkd', placement='sharded').table()",
]


@pytest.mark.parametrize("statement", IMPORTS)
def test_a_02_importing_loads_no_heavy_package(statement):
    code = f"{statement}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    assert run_fresh(code, {}) == []


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment({}), check=True, timeout=60)
    return time.perf_counter() - start


@pytest.mark.parametrize("statement", IMPORTS[:2])
def test_a_02_importing_takes_no_time(statement):
    bare = min(seconds("pass") for _ in range(5))
    assert min(seconds(statement) for _ in range(5)) - bare < 0.3


def type_checking_imports() -> dict[str, str]:
    """Name -> module of the imports that only type checkers see."""
    tree = ast.parse(Path(inspect.getfile(silverspoon_kd)).read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    return {alias.name: str(node.module) for node in block.body for alias in node.names}  # type: ignore[attr-defined]


def test_the_three_lists_of_names_agree():
    sources = silverspoon_kd._SOURCES
    assert sorted(silverspoon_kd.__all__) == sorted(sources)
    assert len(set(silverspoon_kd.__all__)) == len(silverspoon_kd.__all__)
    assert type_checking_imports() == sources
    assert set(sources) <= set(dir(silverspoon_kd))


def test_every_error_is_public():
    errors = importlib.import_module("silverspoon_kd.errors")
    kinds = {name for name, item in vars(errors).items() if inspect.isclass(item) and issubclass(item, Exception)}
    assert kinds == {name for name, module in silverspoon_kd._SOURCES.items() if module == "silverspoon_kd.errors"}


@pytest.mark.parametrize("name", silverspoon_kd.__all__)
def test_every_public_name_is_there(name):
    value = getattr(silverspoon_kd, name)
    assert value is getattr(importlib.import_module(silverspoon_kd._SOURCES[name]), name)


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'silverspoon_kd' has no attribute 'HolisticDistiler'"):
        silverspoon_kd.HolisticDistiler  # noqa: B018
    code = "import silverspoon_kd; silverspoon_kd.TeacherPlacment"
    shown = subprocess.run([sys.executable, "-c", code], env=environment({}), capture_output=True, text=True).stderr
    assert "Did you mean: 'TeacherPlacement'?" in shown


def test_version(monkeypatch):
    module = importlib.import_module("silverspoon_kd._version")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.2.3 of {name}")
    assert importlib.reload(module).__version__ == "1.2.3 of silverspoon-kd"

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert importlib.reload(module).__version__ == "0+unknown"
    monkeypatch.undo()
    assert importlib.reload(module).__version__ == silverspoon_kd.__version__


def test_types_are_marked():
    assert (Path(inspect.getfile(silverspoon_kd)).parent / "py.typed").is_file()


def test_the_split_needs_no_installed_package():
    # -S leaves out every installed package, and -I the environment.
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from silverspoon_kd.distributed import TeacherPlacement, setup_split_gpu\n"
        "print(json.dumps(TeacherPlacement([1]).teacher_only_devices))"
    )
    source = environment({})["PYTHONPATH"]
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, source], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [1]
