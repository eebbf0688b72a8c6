"""Imports point down: the layers of the package, and its lowest ones without any installed package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import source_checks as checks

UPWARD = [
    ("errors", "tree"),
    ("distributed", "tree"),
    ("tree", "capture"),
    ("losses", "objectives"),
    ("alignment", "optim"),
    ("objectives", "student"),
    ("optim", "objectives"),
    ("objectives", "optim"),
    ("student", "teacher"),
    ("teacher", "student"),
    ("teacher", "training"),
    ("model_tools", "training"),
    ("training", "cli"),
]
DOWNWARD = [
    ("cli", "training"),
    ("training", "student"),
    ("training", "teacher"),
    ("student", "objectives"),
    ("model_tools", "alignment"),
    ("alignment", "losses"),
    ("capture", "tree"),
    ("tree", "errors"),
]


def lint_imports(root: Path, source: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--config", "pyproject.toml"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60)


def plant(root: Path, imports: list[tuple[str, str]]) -> None:
    """A package of the same name with the given imports, under the project's own contracts."""
    shutil.copy(checks.REPOSITORY / "pyproject.toml", root)
    (root / "silverspoon_kd").mkdir()
    (root / "silverspoon_kd" / "__init__.py").touch()
    lines: dict[str, list[str]] = {}
    for importer, imported in imports:
        lines.setdefault(importer, []).append(f"from silverspoon_kd.{imported} import x\n")
        lines.setdefault(imported, [])
    for name, body in lines.items():
        (root / "silverspoon_kd" / f"{name}.py").write_text("".join(body))


def test_package_keeps_its_layers():
    result = lint_imports(checks.REPOSITORY, checks.REPOSITORY / "src")
    assert result.returncode == 0, result.stdout + result.stderr


def test_downward_imports_are_fine(tmp_path):
    plant(tmp_path, DOWNWARD)
    result = lint_imports(tmp_path, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_finds_upward_imports(tmp_path):
    # All in one run: starting the tool once per pair would take most of the time of these tests.
    plant(tmp_path, UPWARD)
    result = lint_imports(tmp_path, tmp_path)
    assert result.returncode == 1
    shown = result.stdout.replace("\n", " ")
    missed = [pair for pair in UPWARD if "silverspoon_kd.{} -> silverspoon_kd.{}".format(*pair) not in shown]
    assert missed == [], result.stdout


def test_finds_a_module_without_a_layer(tmp_path):
    plant(tmp_path, [("helpers", "errors")])
    result = lint_imports(tmp_path, tmp_path)
    assert result.returncode == 1
    assert "silverspoon_kd.helpers" in result.stdout


def test_nothing_below_the_command_line_imports_through_the_package_itself():
    assert checks.root_import_problems(checks.package_modules()) == []


def test_finds_an_import_through_the_package_itself():
    losses = checks.parse("silverspoon_kd.losses", "from silverspoon_kd import Distiller, tree")
    tree = checks.parse("silverspoon_kd.tree", "from .errors import DataError")
    command = checks.parse("silverspoon_kd.cli.train", "from silverspoon_kd import Distiller")
    found = checks.root_import_problems([losses, tree, command])
    assert found == [
        "silverspoon_kd.losses takes silverspoon_kd.Distiller from silverspoon_kd itself; "
        "import it from the module that defines it"
    ]


def test_lowest_layers_import_the_standard_library_only():
    assert checks.standard_library_problems(checks.package_modules()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from numpy import array",
        "try:\n    import torch\nexcept ImportError:\n    import numpy",
        "class A:\n    import torch",
        "from silverspoon_kd.tree import map_tensors",
        "from ..tree import map_tensors",
    ],
)
def test_finds_an_installed_package_in_the_lowest_layers(source):
    assert checks.standard_library_problems([checks.parse("silverspoon_kd.distributed.plan", source)])
    assert checks.standard_library_problems([checks.parse("silverspoon_kd.tree", source)]) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os.path\nfrom dataclasses import dataclass",
        "from silverspoon_kd.errors import PlacementError\nfrom .split_gpu import setup_split_gpu",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "def f():\n    import torch",
    ],
)
def test_standard_library_and_late_imports_are_fine(source):
    assert checks.standard_library_problems([checks.parse("silverspoon_kd.distributed.plan", source)]) == []
