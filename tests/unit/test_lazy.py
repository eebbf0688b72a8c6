"""Lazy package attributes on a package made for the test."""

import sys

import pytest

PACKAGE = """
from silverspoon_kd._lazy import lazy_attributes
__getattr__, __dir__ = lazy_attributes(__name__, {
    "value": __name__ + ".good",
    "absent": __name__ + ".good",
    "needy": __name__ + ".needy",
    "broken": __name__ + ".broken",
})
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "lazy_example"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "good.py").write_text("value = object()\n")
    (folder / "needy.py").write_text("import a_package_that_nobody_has\n")
    (folder / "broken.py").write_text("raise RuntimeError('broken while importing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_example

    yield lazy_example
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_example"]:
        del sys.modules[name]


def test_a_name_is_imported_on_first_use_and_kept(package):
    assert "lazy_example.good" not in sys.modules and "value" not in vars(package)
    from lazy_example import value

    assert value is sys.modules["lazy_example.good"].value
    assert vars(package)["value"] is value


def test_dir_lists_names_that_are_not_imported_yet(package):
    assert {"value", "needy", "__name__"} <= set(dir(package))
    assert dir(package) == sorted(dir(package))
    assert "lazy_example.good" not in sys.modules


def test_unknown_names(package):
    with pytest.raises(AttributeError, match="module 'lazy_example' has no attribute 'valeu'") as caught:
        package.valeu  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("valeu", package)
    assert not hasattr(package, "nothing")
    with pytest.raises(ImportError, match="cannot import name 'valeu'"):
        from lazy_example import valeu  # noqa: F401


def test_a_name_that_its_module_lacks(package):
    with pytest.raises(AttributeError, match="module 'lazy_example.good' has no attribute 'absent'"):
        package.absent  # noqa: B018


def test_errors_of_an_import_surface_as_themselves(package):
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError) as caught:
            package.needy  # noqa: B018
        assert caught.value.name == "a_package_that_nobody_has"
        with pytest.raises(RuntimeError, match="broken while importing"):
            from lazy_example import broken  # noqa: F401
