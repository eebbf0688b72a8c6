"""Package attributes that are imported when they are first used (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_attributes(package: str, sources: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build ``__getattr__`` and ``__dir__`` for a package whose names live in other modules.

    Args:
        package: Name of the package (its ``__name__``).
        sources: Public name -> full name of the module that defines it.

    Returns:
        The two module functions. A looked-up value is kept in the package, so each name is looked up once. A name that
        is in no module is an ``AttributeError``; an error raised while a module is imported is passed on as it is.
    """

    def get_attribute(name: str) -> Any:
        module = sys.modules[package]
        if name not in sources:
            # With name and obj set, Python itself adds "Did you mean".
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        value = getattr(importlib.import_module(sources[name]), name)
        setattr(module, name, value)
        return value

    def list_attributes() -> list[str]:
        return sorted({*vars(sys.modules[package]), *sources})

    return get_attribute, list_attributes
