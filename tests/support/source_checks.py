"""Rules about the source code of the package. Each check takes modules and returns one sentence per violation."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "silverspoon_kd"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_METHODS = 15

# The one class of ours that is meant to be subclassed though it can be used itself: a Trainer, as users know Trainers.
OPEN_CLASSES = frozenset({"DistillationTrainer"})

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its text and its syntax tree."""

    name: str
    source: str
    tree: ast.Module
    is_package: bool = False

    @property
    def part(self) -> str:
        """The subpackage or module right below the package, such as ``training``; empty for the package itself."""
        return ([*self.name.split("."), ""])[1]


@dataclass(frozen=True)
class ClassRecord:
    """A class of the package and what decides whether it is abstract or final."""

    name: str
    module: Module
    node: ast.ClassDef
    bases: tuple[str, ...]  # full names, as the module's imports resolve them

    @property
    def full_name(self) -> str:
        return f"{self.module.name}.{self.name}"

    def methods(self) -> dict[str, Function]:
        return {node.name: node for node in self.node.body if isinstance(node, Function)}

    def is_abstract(self) -> bool:
        named = {base.rsplit(".", 1)[-1] for base in self.bases}
        return bool(named & {"ABC", "Protocol"}) or any(map(is_abstract_method, self.methods().values()))


def parse(name: str, source: str, is_package: bool = False) -> Module:
    return Module(name, source, ast.parse(source), is_package)


def package_modules() -> list[Module]:
    """Every module of the package in this checkout."""
    root = REPOSITORY / "src"
    modules = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        modules.append(parse(".".join(parts[:-1] if is_package else parts), path.read_text("utf-8"), is_package))
    return modules


# --- sizes ---------------------------------------------------------------------------------------------------------


def size_problems(modules: Iterable[Module]) -> list[str]:
    problems = []
    for module in modules:
        if (lines := len(module.source.splitlines())) > MAX_FILE_LINES:
            problems.append(f"{module.name} has {lines} lines; at most {MAX_FILE_LINES}")
        for node in ast.walk(module.tree):
            if isinstance(node, Function) and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                problems.append(f"{module.name}.{node.name} has {lines} lines; at most {MAX_FUNCTION_LINES}")
            elif isinstance(node, ast.ClassDef) and (count := len(_public_methods(node))) > MAX_PUBLIC_METHODS:
                problems.append(f"{module.name}.{node.name} has {count} public methods; at most {MAX_PUBLIC_METHODS}")
    return problems


def _public_methods(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, Function) and not item.name.startswith("_")}


# --- devices, ranks and the Trainer --------------------------------------------------------------------------------


def mentions(module: Module) -> Iterator[str]:
    """Full names of all that the module imports, and of all attributes that it reads from something imported."""
    names = imported_names(module)
    yield from names.values()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node)):
            first, _, rest = dotted.partition(".")
            if first in names:
                yield f"{names[first]}.{rest}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported_names(module: Module) -> dict[str, str]:
    """Local name -> full name for every import statement of the module, wherever it stands."""
    names = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, node)
            names.update({alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names})
    return names


def cuda_problems(modules: Iterable[Module]) -> list[str]:
    """``torch.cuda`` outside the device module: the same lines must run on every kind of accelerator."""
    return [
        f"{module.name} uses {name}; use torch.accelerator or device.type"
        for module in modules
        if module.part != "device"
        for name in sorted({name for name in mentions(module) if _inside(name, "torch.cuda")})
    ]


def rank_problems(modules: Iterable[Module]) -> list[str]:
    """``torch.distributed`` outside the two parts that know about ranks."""
    return [
        f"{module.name} uses {name}; only training and teacher know about ranks"
        for module in modules
        if module.part not in {"training", "teacher"}
        for name in sorted({name for name in mentions(module) if _inside(name, "torch.distributed")})
    ]


def trainer_problems(modules: Iterable[Module]) -> list[str]:
    """The Trainer or its arguments below ``training``."""
    banned = ("transformers.Trainer", "transformers.TrainingArguments", "transformers.trainer")
    banned += ("transformers.training_args", "transformers.Seq2SeqTrainer")
    return [
        f"{module.name} uses {name}; nothing below training knows the Trainer"
        for module in modules
        if module.part not in {"training", "cli", ""}
        for name in sorted({name for name in mentions(module) if any(_inside(name, item) for item in banned)})
    ]


def standard_library_problems(modules: Iterable[Module]) -> list[str]:
    """Imports of installed packages in the parts that must work before torch is imported."""
    light = {"distributed", "errors", "_lazy", "_version", ""}
    problems = []
    for module in modules:
        if module.part not in light:
            continue
        for node in _statements_that_run(module.tree):
            for name in _imported_modules(module, node):
                top, part = ([*name.split("."), ""])[:2]
                if top not in sys.stdlib_module_names and not (top == PACKAGE and part in light):
                    problems.append(f"{module.name} imports {name}; it may import the standard library only")
    return problems


def root_import_problems(modules: Iterable[Module]) -> list[str]:
    """Public names taken from the package itself: that import is lazy, so the layers cannot see where it leads."""
    modules = list(modules)
    parts = {module.part for module in modules}
    return [
        f"{module.name} takes {name} from {PACKAGE} itself; import it from the module that defines it"
        for module in modules
        if module.part not in {"cli", "__main__", ""}
        for name in sorted(set(imported_names(module).values()))
        if name.startswith(f"{PACKAGE}.") and name.count(".") == 1 and name.partition(".")[2] not in parts
    ]


# --- classes -------------------------------------------------------------------------------------------------------


def class_problems(modules: Iterable[Module]) -> list[str]:
    """A class is abstract or never subclassed, only abstract methods are overridden, nothing probes itself."""
    modules = list(modules)
    classes = {record.full_name: record for module in modules for record in _classes(module)}
    problems = []
    for record in classes.values():
        for base in filter(None, (_find(name, classes) for name in record.bases)):
            problems += _inheritance_problems(record, base)
    for module in modules:
        problems += [
            f"{module.name}:{node.lineno} probes its own object with hasattr"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) == "hasattr"
            and ast.unparse(node.args[0]) == "self"
        ]
    return problems


def is_abstract_method(method: Function) -> bool:
    return any(ast.unparse(item).rsplit(".", 1)[-1] == "abstractmethod" for item in method.decorator_list)


def _inheritance_problems(record: ClassRecord, base: ClassRecord) -> list[str]:
    if base.module.part == "errors" or base.name in OPEN_CLASSES:
        return []
    if not base.is_abstract():
        return [f"{record.full_name} subclasses {base.full_name}, which is not abstract"]
    concrete = {name for name, method in base.methods().items() if not is_abstract_method(method)}
    return [
        f"{record.full_name} overrides {base.full_name}.{name}, which is not abstract"
        for name in sorted(concrete & set(record.methods()))
        if not name.startswith("__")
    ]


def _classes(module: Module) -> Iterator[ClassRecord]:
    names = imported_names(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            bases = []
            for expression in node.bases:
                if isinstance(expression, ast.Subscript):  # Protocol[T]
                    expression = expression.value
                first, _, rest = _dotted(expression).partition(".")
                known = names.get(first, f"{module.name}.{first}")
                bases.append(f"{known}.{rest}" if rest else known)
            yield ClassRecord(node.name, module, node, tuple(bases))


def _find(name: str, classes: dict[str, ClassRecord]) -> ClassRecord | None:
    """The class of that full name; a name that a package passes on is found by its last part."""
    if name in classes or not name.startswith(f"{PACKAGE}."):
        return classes.get(name)
    last = name.rsplit(".", 1)[-1]
    return next((record for record in classes.values() if record.name == last), None)


# --- words ---------------------------------------------------------------------------------------------------------

# Bracketed letters keep this file from matching itself.
_UNFINISHED = re.compile(r"\b(T[O]DO|F[I]XME|X[X]X|H[A]CK|s[t]ub(s|bed)?|p[l]aceholder)\b")
_MACHINE_PATH = re.compile(r"(?<![\w.~])/(work|root|home|tmp)/")


def word_problems(name: str, text: str) -> list[str]:
    """Signs of unfinished work and paths of one machine."""
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, what in ((_UNFINISHED, "a sign of unfinished work"), (_MACHINE_PATH, "a path of one machine")):
            if found := pattern.search(line):
                problems.append(f"{name}:{number} has {what}: {found.group()}")
    return problems


# --- syntax helpers ------------------------------------------------------------------------------------------------


def _inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` for a chain of plain names, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def _origin(module: Module, node: ast.ImportFrom) -> str:
    """The full name of the module that a ``from`` import reads, also of a relative one."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = len(parts) - node.level + module.is_package
    return ".".join([*parts[:kept], *filter(None, [node.module])])


def _imported_modules(module: Module, node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [_origin(module, node)] if isinstance(node, ast.ImportFrom) else []


def _statements_that_run(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not the bodies of functions nor of ``if TYPE_CHECKING``."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, Function) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        pending += [item for handler in getattr(node, "handlers", []) for item in handler.body]
