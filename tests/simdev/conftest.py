"""Tests that simulate devices run in processes of their own.

The device becomes its process's accelerator for good, which other tests must not see. A test that asks for the fixture
``sim`` (synchronous and asynchronous mode) or ``async_sim`` is therefore not called here: all such tests of a file are
run by one more pytest for each mode, and what happened there is reported here. To debug one, run it there directly::

    SIMDEV_MODE=async python -m pytest tests/simdev/test_streams.py -k overlap
"""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from simdev import simdev

NUM_DEVICES = 4
MODES = ("sync", "async")
MODE = os.environ.get("SIMDEV_MODE")  # set in the processes that simulate
TIME_LIMIT = 300  # seconds for the tests of one file in one mode, and for building


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
    if MODE is None:
        item.add_marker(pytest.mark.timeout(2 * TIME_LIMIT + 60))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Here and not in the fixture: the report then has one line for all of them.
    lacking = simdev.missing() if "library" in getattr(item, "fixturenames", ()) else None
    if lacking is not None:
        pytest.skip(f"THE SIMULATED DEVICE WAS NOT TESTED: {lacking}.")


@pytest.fixture(scope="session")
def library() -> None:
    """The compiled device."""
    done = subprocess.run(
        [sys.executable, simdev.__file__], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )
    assert done.returncode == 0, f"The simulated device could not be built:\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def _quick_collections() -> None:
    """Every training run collects garbage, which takes longer than its steps."""
    if MODE is not None:
        gc.freeze()


@pytest.fixture(params=MODES if MODE is None else [MODE])
def sim(request: pytest.FixtureRequest, library: None, _quick_collections: None) -> Iterator[ModuleType | None]:
    """``torch.sim`` with four devices, in each mode; None where the test is not called."""
    yield from _simulation(request.param)


@pytest.fixture(params=["async"])
def async_sim(request: pytest.FixtureRequest, library: None) -> Iterator[ModuleType | None]:
    """The same in asynchronous mode only, for what has no meaning without."""
    yield from _simulation(request.param)


def _simulation(mode: str) -> Iterator[ModuleType | None]:
    if MODE is None:
        yield None
        return
    device = simdev.install(NUM_DEVICES)
    device.set_async(mode == "async")
    yield device
    device.set_op_delay_us(0)
    device.set_race_check(0)
    for index in range(NUM_DEVICES):
        device.synchronize(index)
    device.races()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mode = _mode_of(pyfuncitem)
    if MODE is not None or mode is None:
        return None
    problem, output = _results(pyfuncitem, mode)[pyfuncitem.name]
    print(output)
    if problem is not None:
        pytest.fail(problem, pytrace=False)
    return True


def _mode_of(item: pytest.Item) -> str | None:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return parameters.get("sim", parameters.get("async_sim"))


_Results = dict[str, tuple[str | None, str]]
_kept = pytest.StashKey[dict[tuple[Path, str], _Results]]()


def _results(item: pytest.Item, mode: str) -> _Results:
    """Return what went wrong (or None) and what was printed in each chosen test of a file, run once for each mode."""
    kept = item.session.stash.setdefault(_kept, {})
    if (item.path, mode) not in kept:
        chosen = [each for each in item.session.items if each.path == item.path and _mode_of(each) == mode]
        kept[item.path, mode] = _run([each.nodeid for each in chosen], mode, item.config.rootpath)
    return kept[item.path, mode]


def _run(tests: list[str], mode: str, root: Path) -> _Results:
    report = simdev.BUILDS / f"report-{os.getpid()}-{mode}.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_logging=all"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "SIMDEV_MODE": mode}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
        log = f"It ended with {done.returncode}.\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        results = _read(report) if report.exists() else {}
    except subprocess.TimeoutExpired:
        log, results = f"It took more than {TIME_LIMIT} s.", {}
    finally:
        report.unlink(missing_ok=True)
    names = [test.split("::", 1)[1] for test in tests]
    return {name: results.get(name, (f"The process with this test gave no result:\n{log}", "")) for name in names}


def _read(report: Path) -> _Results:
    results: _Results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [child.text or child.get("message", "") for child in case if child.tag in ("failure", "error")]
        problems += [f"was skipped: {child.get('message')}" for child in case.iter("skipped")]
        results[case.get("name", "")] = ("\n".join(problems) or None, case.findtext("system-out") or "")
    return results
