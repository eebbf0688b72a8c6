"""A simulated accelerator: several devices in host memory, of the device type ``sim``.

It exists so that code for several devices, streams and events can be run and checked on a machine without any::

    from simdev import simdev

    sim = simdev.install(4)
    x = torch.randn(4, 4).to("sim:1")  # mixing devices raises PyTorch's own error
    sim.set_async(True)  # a thread for each stream; by default work runs when it is launched
    sim.set_race_check(2)  # raise where no event or stream order protects memory, or where it is freed too early
    sim.set_op_delay_us(2000)  # each operation takes time, so that overlap can be measured on few cores

It becomes the process's accelerator (``torch.accelerator``) for good, so it is for processes of their own: see
conftest.py. ``python tests/simdev/simdev.py`` builds it, which takes most of a minute and is done once.

Its limits: no numerics of a GPU (CPU kernels compute), no fragmentation, flash attention, graphs or NCCL
(:mod:`simdev.simgloo` stages collectives through gloo), and random numbers come from the host's generator. A model is
moved to ``sim`` before ``fully_shard``. ``dispatch_model`` wants "sim:1", not 1.
"""

import atexit
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

NAME = "silverspoon_simdev"
SOURCES = Path(__file__).resolve().parent / "csrc"
BUILDS = Path(__file__).resolve().parents[2] / "build" / "simdev"
COMPILE_ARGUMENTS = ["-O1", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def missing() -> str | None:
    """Return what this machine lacks to build the device, or None."""
    if library_path().exists():
        return None
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler (looked for {compiler!r})"
    headers = Path(sysconfig.get_path("include"))
    return None if (headers / "Python.h").exists() else f"Python's headers are not installed (no Python.h in {headers})"


def library_path() -> Path:
    """Return where the library for this PyTorch and these sources belongs."""
    digest = hashlib.sha256("".join(COMPILE_ARGUMENTS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return BUILDS / f"torch-{version('torch')}-{digest.hexdigest()[:16]}" / f"{NAME}{suffix}"


def build() -> Path:
    """Compile the library unless that is done, and return where it is."""
    path = library_path()
    BUILDS.mkdir(parents=True, exist_ok=True)
    with _only_one():
        if not path.exists():
            # Moved into place when it is whole: a build that was killed leaves nothing that looks finished.
            with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
                built = _compile(Path(folder))
                path.parent.mkdir(exist_ok=True)
                built.replace(path)
    return path


def install(num_devices: int = 2) -> ModuleType:
    """Make ``sim:0`` to ``sim:{num_devices - 1}`` this process's accelerator and return ``torch.sim``."""
    import torch

    from simdev import device_module

    if not hasattr(torch, "sim"):
        native = _load(build())
        device_module.attach(native)
        torch.utils.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", device_module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        atexit.register(native.shutdown)
    device_module.native().set_device_count(num_devices)
    return device_module


def _compile(folder: Path) -> Path:
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    extension = CppExtension(NAME, sources, extra_compile_args=COMPILE_ARGUMENTS)
    command = BuildExtension(Distribution({"name": NAME, "ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(folder), str(folder)
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath(NAME))


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _only_one() -> Iterator[None]:
    """Let one process at a time build; the lock goes with the process that holds it."""
    with (BUILDS / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(build())
