"""The house: which room may import which, who reads the environment, and what is public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import evenstep

SOURCE = Path(evenstep.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

# From the roof to the ground: a room imports only from rooms that stand further down.
ROOMS = [
    "testing",
    "__main__",
    "cli",
    "about",
    "bench",
    "verify",
    "launcher",
    "checkpoint",
    "data",
    "optim",
    "replica",
    "logger",
    "joining",
    "meeting",
    "world",
    "console",
    "transport",
    "health",
    "determinism",
    "heap",
    "openmp",
    "c_library",
    "lanes",
    "randomness",
    "device",
    "environment",
    "network",
    "checks",
    "errors",
]
LAUNCHER_NEEDS = {"health", "environment", "network", "device", "checks", "errors"}  # it starts before there is a world
MAX_LINES = 450


def room_of(module: Path) -> str:
    return module.relative_to(SOURCE).with_suffix("").parts[0]


def imports_of(module: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of evenstep's own, wherever in the file; the room of `import evenstep` is ""."""
    for node in ast.walk(ast.parse(module.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.name}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "evenstep":
                yield node.lineno, rest[0] if rest else ""


def module_imports() -> dict[str, set[str]]:
    """By module of evenstep's own, the others that it imports, wherever in the file and whatever for."""
    paths = {}
    for path in MODULES:
        *rooms, last = path.relative_to(SOURCE).with_suffix("").parts
        paths[".".join(["evenstep", *rooms, *([] if last == "__init__" else [last])])] = path
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {each if each in paths else str(node.module) for each in inside}
        found[name] = imported & paths.keys() - {name}
    return found


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions, classes and their methods whose names have no leading underscore."""
    bodies: list[list[ast.stmt]] = [tree.body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                yield node
                if isinstance(node, ast.ClassDef):
                    bodies.append(node.body)


def is_overload(node: ast.AST) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "overload" for d in getattr(node, "decorator_list", []))


def test_public_names_are_pinned():
    """Adding a name is a decision: it is made here and in `__init__.py`."""
    assert sorted(evenstep.__all__) == [
        "Checkpointer",
        "DataLoader",
        "DataParallel",
        "DistributedDataParallel",
        "DistributedSampler",
        "EvenstepError",
        "ExponentialAverage",
        "LinearWarmup",
        "LocalUpdates",
        "Logger",
        "Records",
        "ShardedOptimizer",
        "SyncBatchNorm",
        "TokenDataset",
        "WeightedSampler",
        "World",
        "clip_grad_norm_",
        "clip_grad_value_",
        "fuse",
        "init",
        "launch",
        "scale_learning_rate",
    ]
    assert all(hasattr(evenstep, name) for name in evenstep.__all__)


def test_every_room_has_its_place():
    assert {room_of(module) for module in MODULES} - {"__init__"} == set(ROOMS)


def test_no_modules_import_each_other():
    """Neither in functions nor for types alone: what two need is in a third, or said by a protocol."""
    left = module_imports()
    while True:
        ground = {name for name, imported in left.items() if not imported & left.keys()}
        if not ground:
            break
        left = {name: imported for name, imported in left.items() if name not in ground}
    assert not left, f"in circles, or above one: {sorted(left)}"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_point_downward(module: Path):
    room = room_of(module)
    if room == "__init__":
        return  # the public names come from anywhere
    for line, target in imports_of(module):
        where = f"{module.relative_to(SOURCE)}:{line}"
        if target == "":
            assert room == "cli", f"{where}: `import evenstep` is upward; import the room"
            continue
        if target == room:
            continue
        assert target in ROOMS, f"{where}: imports {target}, which is no room"
        assert ROOMS.index(target) > ROOMS.index(room), f"{where}: {room} imports {target}, which stands above it"
        assert room != "launcher" or target in LAUNCHER_NEEDS, f"{where}: the launcher may not need {target}"


def test_the_checker_sees_imports_everywhere(tmp_path: Path):
    """Also those inside functions and blocks."""
    module = tmp_path / "module.py"
    module.write_text(
        "import evenstep\nimport torch\nfrom evenstep import world\n"
        "def f():\n    from evenstep.data.loader import DataLoader\n    import evenstep.errors as e\n"
    )
    assert sorted(imports_of(module)) == [(1, ""), (3, "world"), (5, "data"), (6, "errors")]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_only_one_room_touches_the_environment(module: Path):
    if room_of(module) == "environment":
        return
    for node in ast.walk(ast.parse(module.read_text())):
        found = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found = node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found = next((alias.name for alias in node.names if "env" in alias.name), None)
        assert found not in ("environ", "environb", "getenv", "putenv", "unsetenv"), (
            f"{module.relative_to(SOURCE)}:{node.lineno}: os.{found}; the environment is read in environment.py"
        )


FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
FACTORIES |= {"scalar_tensor", "tensor", "zeros"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_new_tensors_say_where_they_lie(module: Path):
    """Else a script's `torch.set_default_device` would decide."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            is_torchs = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            assert not is_torchs or any(keyword.arg in ("device", None) for keyword in node.keywords), (
                f"{module.relative_to(SOURCE)}:{node.lineno}: torch.{node.func.attr} without a device"
            )


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_files_stay_readable(module: Path):
    """Short enough to be read in one sitting, and every public definition says what it is."""
    text = module.read_text()
    lines = len(text.splitlines())
    assert lines <= MAX_LINES, f"{module.relative_to(SOURCE)} has {lines} lines; what is it that could stand alone?"
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not tree.body, f"{module.relative_to(SOURCE)} has no docstring"
    for node in public_definitions(tree):
        if not is_overload(node):
            assert ast.get_docstring(node), f"{module.relative_to(SOURCE)}:{node.lineno}: {node.name} has no docstring"
