"""No signs of unfinished work, no paths of one machine, and a docstring on everything public."""

import inspect

import pytest

import silverspoon_kd
from support import source_checks as checks

TEXT_FILES = [
    path
    for folder, pattern in [
        ("tests", "*.py"),
        ("examples", "*"),
        ("docs", "*.md"),
        ("benchmarks", "*.py"),
        (".", "*.md"),
    ]
    for path in (checks.REPOSITORY / folder).glob(pattern if folder == "." else f"**/{pattern}")
    if path.suffix in {".py", ".md", ".yaml", ".sh"}
]


def documented(name: str, value: object) -> list[str]:
    """What is missing on one public object and, for a class of the package, on its public methods."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return []
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    problems = [] if own and not own.startswith(f"{value.__name__}(") else [f"{name} has no docstring"]
    if inspect.isclass(value):
        problems += [
            f"{name}.{method} has no docstring"
            for method, item in vars(value).items()
            if inspect.isfunction(item) and not method.startswith("_") and not inspect.getdoc(getattr(value, method))
        ]
    return problems


def test_package_has_no_unfinished_work():
    assert [
        line for module in checks.package_modules() for line in checks.word_problems(module.name, module.source)
    ] == []


def test_no_paths_of_one_machine_anywhere():
    found = [
        line
        for path in TEXT_FILES
        for line in checks.word_problems(str(path.relative_to(checks.REPOSITORY)), path.read_text("utf-8"))
        if "a path of one machine" in line
    ]
    assert found == []


def test_public_names_are_documented():
    assert [line for name in silverspoon_kd.__all__ for line in documented(name, getattr(silverspoon_kd, name))] == []


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "st" + "ub", "place" + "holder", "X" * 3])
def test_finds_unfinished_work(word):
    assert checks.word_problems("m", f"x = 1\n# {word}: later") == [f"m:2 has a sign of unfinished work: {word}"]
    assert checks.word_problems("m", f"# my{word}ed and {word}_name") == []


@pytest.mark.parametrize("folder", ["work", "root", "home", "tmp"])
def test_finds_a_path_of_one_machine(folder):
    path = f"/{folder}/x"
    assert checks.word_problems("m", f'open("{path}")') == [f"m:1 has a path of one machine: /{folder}/"]
    assert checks.word_problems("m", f"net{path} and ~{path} and .{path}") == []


def test_finds_missing_docstrings():
    from dataclasses import dataclass

    @dataclass
    class Generated:
        x: int

    class Documented:
        """Words."""

        def method(self): ...

    class Child(Documented): ...

    def function(): ...

    assert documented("Generated", Generated) == ["Generated has no docstring"]
    assert documented("Documented", Documented) == ["Documented.method has no docstring"]
    assert documented("Child", Child) == ["Child has no docstring"]
    assert documented("function", function) == ["function has no docstring"]
    assert documented("__version__", "1.0") == []
