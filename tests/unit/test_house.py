"""The house: which room may import which, who reads the environment, and what is public."""

from __future__ import annotations

import ast
import functools
import re
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
    "public",
    "cli",
    "tools",
    "launcher",
    "parameter_servers",
    "checkpoint",
    "data",
    "parallel",
    "optim",
    "replica",
    "logger",
    "joining",
    "world",
    "transport",
    "ground",
    "console",
    "checks",
    "errors",
]
# By package, its files and sub-packages from the roof to the ground: one imports only those further down.
ORDER: dict[str, list[str]] = {
    "parameter_servers": [
        "api",
        "batches",
        "meeting",
        "worker",
        "server",
        "wire",
        "checkpoint",
        "preparation",
        "shard",
        "deciding",
        "embedding",
    ],
    "parameter_servers.deciding": ["coordinator", "batch_queue"],
    "parameter_servers.embedding": ["remote_embedding", "table", "initial_rows"],
    "tools": ["doctor", "convert", "bench", "verify", "preflight", "estimate", "observing", "reading"],
    "tools.bench": [
        "command",
        "compare",
        "report",
        "findings",
        "runs",
        "probe",
        "watching",
        "scaling",
        "decompose",
        "records",
        "profile",
        "plan",
    ],
    "tools.estimate": ["estimate", "probe", "footprint"],
    "checkpoint": [
        "checkpointer",
        "tools",
        "exchange",
        "tier",
        "save",
        "load",
        "dcp",
        "directory",
        "lock",
        "store",
        "format",
    ],
    "checkpoint.format": ["manifest", "plan", "payload", "tree", "regions", "random_streams"],
    "checkpoint.load": ["fetch", "mirror", "restore", "compare", "reader", "layouts", "recovery"],
    "checkpoint.save": ["commit", "writer", "snapshot", "stopping"],
    "cli": [
        "main",
        "commands",
        "bench",
        "checkpoint",
        "convert",
        "doctor",
        "env",
        "estimate",
        "run",
        "verify",
        "arguments",
    ],
    "ground": ["computing", "coordination", "health", "compat", "environment", "host"],
    "ground.computing": ["determinism", "virtual_ranks", "randomness", "device", "pytrees"],
    "ground.host": ["network", "temporary", "processes", "control_groups", "named_files"],
    "ground.compat": [
        "torch_elastic",
        "torch_autograd",
        "torch_data",
        "torch_ddp",
        "torch_distributed",
        "torch_dynamo",
        "torch_modules",
        "torch_profiler",
        "torch_pytree",
        "torch_tensors",
        "private_names",
        "c_library",
    ],
    "ground.compat.c_library": ["mapping", "heap", "openmp", "libc"],
    "ground.coordination": ["rendezvous_store", "main_first", "agreement", "mesh"],
    "data": ["loader", "sampler", "sources", "loading", "order", "position"],
    "data.loading": ["device_prefetch", "workers", "fetch", "digests", "nested"],
    "data.order": ["batch_plan", "drawn", "epochs", "max_tokens", "weighted", "permutation"],
    "data.sources": ["samples", "streams", "same_data", "same_stream", "source", "webdataset", "tokens"],
    "tools.convert": [
        "convert",
        "replay",
        "plan",
        "kept",
        "data",
        "models",
        "metrics",
        "output",
        "loops",
        "edits",
        "losses",
        "values",
    ],
    "tools.doctor": [
        "fixes",
        "examination",
        "report",
        "comparing",
        "verdict",
        "rules",
        "calls",
        "scene",
        "asking",
        "findings",
        "rule",
        "run",
    ],
    "tools.reading": ["contexts", "values", "program", "tree", "source", "looked"],
    "tools.doctor.run": ["runs", "probe", "notes", "samples", "writer", "hangs", "events"],
    "ground.environment": ["detect", "inheritance", "placement", "launchers", "hosts", "values", "run_settings"],
    "ground.health": [
        "telemetry",
        "steps",
        "excepthook",
        "peer_heartbeats",
        "first_failure",
        "users_code",
        "phase_timeouts",
        "heartbeat",
    ],
    "launcher": ["run", "launch", "elastic", "pool", "failure", "spawn", "options"],
    "launcher.elastic": [
        "agent",
        "attempt",
        "nodes",
        "rendezvous",
    ],
    "launcher.failure": ["verdict", "report", "hangs", "stacks", "detection"],
    "launcher.options": ["flags", "ranks", "resources", "logs"],
    "launcher.spawn": ["zygote", "start_worker", "script_runner", "own_ranks", "remote", "child", "guard", "log_lines"],
    "logger": ["logger"],
    "tools.observing": [
        "record",
        "changes",
        "devices",
        "scratch",
        "graphs",
        "models",
        "script",
        "patching",
        "launch",
        "thresholds",
    ],
    "optim": [
        "local_sgd",
        "sharded",
        "clipping",
        "ema",
        "learning_rate",
        "loading",
        "arguments",
        "consistency",
        "exact",
        "kinds",
    ],
    "optim.local_sgd": ["local_sgd", "state"],
    "optim.sharded": ["sharded_optimizer", "element_wise", "per_parameter", "flat_segments"],
    "tools.preflight": ["host_report", "rank_check"],
    "replica": [
        "wrapper",
        "data_parallel",
        "sharded",
        "virtual_ranks",
        "monitors",
        "normalization",
        "gradients",
        "batches",
        "join",
        "channels",
        "module_buffers",
    ],
    "replica.data_parallel": ["wrapper", "replicas"],
    "replica.gradients": [
        "engine",
        "autograd_hooks",
        "exchange",
        "division",
        "strategies",
        "observer",
        "window",
        "buckets",
    ],
    "replica.gradients.buckets": ["launch", "comm_hooks", "bucket", "layout"],
    "replica.gradients.exchange": ["all_reduce", "across_ranks", "base", "header", "sparse", "weights"],
    "replica.monitors": ["end_of_run", "checks", "steps", "first_batch", "digests", "in_backward"],
    "replica.normalization": ["sync_batchnorm", "arithmetic"],
    "replica.sharded": ["exchange", "bucket", "gradient_placeholder", "values", "slices"],
    "replica.virtual_ranks": ["loop", "sums"],
    "replica.wrapper": ["distributed", "assembly", "model_check", "settings", "reducer"],
    "parallel": ["parallelize", "model", "exchange", "replicas", "layout", "blocks", "optimizers"],
    "testing": ["pool", "faults", "storage"],
    "transport": ["backend", "tree_order", "factory", "internode", "shm", "process_group", "local", "core", "base"],
    "transport.backend": ["backend", "calls", "observers", "work"],
    "transport.core": [
        "object_collectives",
        "staged",
        "store_gather",
        "worker_thread",
        "transport",
        "validation",
        "last_calls",
        "header",
        "codec",
        "reduction",
        "nonfinite_monitor",
        "fallback",
    ],
    "transport.internode": ["transport", "steps", "plan"],
    "transport.process_group": ["gloo", "transport", "full_duplex"],
    "transport.shm": [
        "handshake",
        "transport",
        "lanes",
        "queue",
        "collectives",
        "allocator",
        "segment",
        "progress",
        "sync",
        "peers",
    ],
    "tools.verify": [
        "resume",
        "ranks",
        "rank",
        "rehearsal",
        "double",
        "report",
        "causes",
        "compare",
        "evidence",
        "traces",
    ],
}
MOST_ENTRIES = 12
# Folders of any number of files that are alike: none imports another, and no list names them.
ALIKE = {"tools.doctor.rules"}
# Attributes of `nn.Module` that subclasses legitimately use; torch documents its `_foreach_` functions too.
DOCUMENTED = re.compile(r"_parameters|_buffers|_modules|_foreach_\w+")
# It starts before there is a world.
LAUNCHER_NEEDS = {
    "ground",
    "console",
    "checks",
    "errors",
}


@functools.cache
def tree_of(module: Path) -> ast.Module:
    """The syntax tree of a file, parsed once for all tests."""
    return ast.parse(module.read_text())


def room_of(module: Path, source: Path = SOURCE) -> str:
    return module.relative_to(source).with_suffix("").parts[0]


def module_imports(source: Path = SOURCE) -> dict[str, set[str]]:
    """By module of evenstep's own, the others that it imports, wherever in the file and whatever for."""
    paths = {}
    for path in sorted(source.rglob("*.py")):
        *rooms, last = path.relative_to(source).with_suffix("").parts
        paths[".".join(["evenstep", *rooms, *([] if last == "__init__" else [last])])] = path
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        imported: set[str] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {each if each in paths else str(node.module) for each in inside}
        found[name] = imported & paths.keys() - {name}
    return found


def entries(source: Path = SOURCE) -> dict[str, set[str]]:
    """By package of evenstep's own, such as "launcher.elastic", the files and packages directly inside."""
    modules = sorted(source.rglob("*.py"))
    packages = [path.parent for path in modules if path.name == "__init__.py" and path.parent != source]
    files = {each: {path.stem for path in modules if path.parent == each} - {"__init__"} for each in packages}
    return {
        ".".join(package.relative_to(source).parts): inside | {each.name for each in packages if each.parent == package}
        for package, inside in files.items()
    }


def misplaced(order: dict[str, list[str]], imports: dict[str, set[str]]) -> list[str]:
    """The imports inside a package that don't point downward in its order, or that go through the package itself."""
    found = []
    for importing, imported in imports.items():
        for package, names in order.items():
            whole = f"evenstep.{package}".rstrip(".")
            inside = f"{whole}."
            if not importing.startswith(inside):
                continue
            above = importing.removeprefix(inside).split(".")[0]
            if whole in imported and (package, above) != ("", "cli"):
                found.append(f"{importing} imports the package {whole} that it lies in")
            for below in {each.removeprefix(inside).split(".")[0] for each in imported if each.startswith(inside)}:
                if above != below and names.index(above) > names.index(below):
                    found.append(f"{importing} imports {inside}{below}, which stands above it")
    return found


GETTERS = ("getattr", "hasattr", "setattr")


def private_torch(tree: ast.Module) -> list[str]:
    """Private names of torch that a file uses: imported, read as attributes, or named to `getattr`, `hasattr`."""
    bound, found = set[str](), []

    def is_private(dotted: str) -> bool:
        return any(part[0] == "_" and part[:2] != "__" and not DOCUMENTED.fullmatch(part) for part in dotted.split("."))

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = {alias.name: alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = {f"{node.module}.{alias.name}": alias.asname or alias.name for alias in node.names}
        else:
            continue
        torchs = {name: alias for name, alias in imported.items() if name.split(".")[0] == "torch"}
        bound |= set(torchs.values())
        found += [f"{node.lineno}: {name}" for name in torchs if is_private(name)]

    def is_torchs(node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in bound

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and is_torchs(node.value):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GETTERS:
            match node.args:
                case [of, ast.Constant(value=str(name)), *_] if is_private(name) and is_torchs(of):
                    found.append(f"{node.lineno}: {ast.unparse(of)}.{name}")
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


def nodes_of(room: str) -> Iterator[tuple[Path, ast.AST]]:
    """(file, node) of all that a room's files say."""
    for module in MODULES:
        if room_of(module) == room:
            for node in ast.walk(tree_of(module)):
                yield module, node


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
        "ExponentialMovingAverage",
        "LocalSGD",
        "Logger",
        "RemoteEmbedding",
        "ShardedOptimizer",
        "SyncBatchNorm",
        "TokenDataset",
        "World",
        "attach",
        "backward",
        "clip_grad_norm_",
        "clip_grad_value_",
        "init",
        "launch",
        "parallelize",
        "parameter_server",
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


def test_imports_point_downward():
    """Of rooms, and inside each package: a file imports only what stands further down than it."""
    assert not misplaced({"": ROOMS, **ORDER}, module_imports())


def test_the_launcher_needs_little():
    of_launcher = [names for name, names in module_imports().items() if name.startswith("evenstep.launcher")]
    assert {name.split(".")[1] for names in of_launcher for name in names} <= {"launcher", *LAUNCHER_NEEDS}


def test_every_package_has_its_order():
    """From the roof to the ground."""
    for package, inside in entries().items():
        assert len(inside) == 1 or package in ALIKE or sorted(ORDER.get(package, [])) == sorted(inside), package


def test_the_docstring_of_a_package_names_its_files():
    """In the order in which to read them."""
    for package, names in ORDER.items():
        text = ast.get_docstring(tree_of(SOURCE / package.replace(".", "/") / "__init__.py")) or ""
        missing = {name for name in names if not re.search(rf"\b{name}\b", text)}
        assert not {name for name in missing if not (name.startswith("torch_") and "torch_<theme>" in text)}, package


def test_the_checker_sees_imports():
    """Upward ones, those of a sub-package's files, and those through the package itself."""
    order = {"": ["g", "a"], "a": ["b", "c", "d"], "a.c": ["e", "f"]}
    assert len(misplaced(order, {"evenstep.a.d": {"evenstep.g"}})) == 1
    assert len(misplaced(order, {"evenstep.a.d": {"evenstep"}})) == 1
    downward = {"evenstep.a.b": {"evenstep.a.c.e", "evenstep.a.d"}, "evenstep.a.c.e": {"evenstep.a.c.f"}}
    assert not misplaced(order, downward)
    assert len(misplaced(order, {"evenstep.a.d": {"evenstep.a.c.e"}})) == 1
    assert len(misplaced(order, {"evenstep.a.c": {"evenstep.a.b"}})) == 1
    assert len(misplaced(order, {"evenstep.a.c.f": {"evenstep.a.c.e"}})) == 1
    assert len(misplaced(order, {"evenstep.a.b": {"evenstep.a"}})) == 1


def test_files_that_are_alike_import_none_of_each_other():
    for package in ALIKE:
        inside = f"evenstep.{package}."
        within = {name: imported for name, imported in module_imports().items() if name.startswith(inside)}
        assert within
        assert not [name for name, imported in within.items() if any(each.startswith(inside) for each in imported)]


def test_a_folder_can_be_looked_at_together():
    sizes = {package: len(inside) for package, inside in entries().items() if package not in ALIKE}
    assert not [package for package, size in sizes.items() if size > MOST_ENTRIES], "want folders inside"


def test_private_names_of_torch_are_in_one_folder():
    """`ground/compat/` says which versions of torch have each, and what happens where it is missing."""
    for module in MODULES:
        if module.relative_to(SOURCE).parts[:2] != ("ground", "compat"):
            assert not private_torch(tree_of(module)), f"{module.relative_to(SOURCE)}: move it to ground/compat/"


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._C import Graph",
        "from torch.distributed import _functional_collectives as f",
        "import torch\ntorch._amp_update_scale_(a)",
        "import torch\nx = torch.utils._pytree.tree_map",
        "from torch.distributed import distributed_c10d as c10d\nc10d._world.pg_map",
        "import torch.distributed as dist\ngetattr(dist, '_private', None)",
    ],
)
def test_the_checker_sees_private_names_of_torch(text: str):
    assert private_torch(ast.parse(text))


@pytest.mark.parametrize("room", ROOMS)
def test_only_one_room_touches_the_environment(room: str):
    for module, node in nodes_of(room):
        if module.relative_to(SOURCE).parts[:2] == ("ground", "environment"):
            continue
        found = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found = node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found = next((alias.name for alias in node.names if "env" in alias.name), None)
        assert found not in ("environ", "environb", "getenv", "putenv", "unsetenv"), (
            f"{module.relative_to(SOURCE)}:{node.lineno}: os.{found}; the environment is read in ground/environment"
        )


FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
FACTORIES |= {"scalar_tensor", "tensor", "zeros"}


@pytest.mark.parametrize("room", ROOMS)
def test_new_tensors_say_where_they_lie(room: str):
    """Else a script's `torch.set_default_device` would decide."""
    for module, node in nodes_of(room):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            is_torchs = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            assert not is_torchs or any(keyword.arg in ("device", None) for keyword in node.keywords), (
                f"{module.relative_to(SOURCE)}:{node.lineno}: torch.{node.func.attr} without a device"
            )


def test_public_definitions_are_documented():
    """Every public definition says what it is."""
    for module in MODULES:
        tree, where = tree_of(module), module.relative_to(SOURCE)
        assert ast.get_docstring(tree) or not tree.body, f"{where} has no docstring"
        for node in public_definitions(tree):
            assert is_overload(node) or ast.get_docstring(node), f"{where}:{node.lineno}: {node.name} has no docstring"
