"""What the names of a script stand for: loaders, batches, models, optimizers, functions, ranks.

Values flow along assignments, arguments, returns, attributes and loops until nothing changes. The order of statements
doesn't matter: a name stands for every value that it is ever assigned. That is coarse, but fits training scripts, where
a name hardly ever means two things. An expression that isn't understood has no value. One that may be either a known
thing or something unknown has the value "unknown" beside the known one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import libcst as cst

from evenstep.tools.reading.tree import Call, File, Frame, Function, Node, dotted, text_of

# Pattern of the called full name, and the kind of value it makes. The first match counts. Patterns have no groups.
_MADE = (
    (r"accelerate\.Accelerator", "accelerator"),
    (r"(?:lightning|lightning_fabric|pytorch_lightning)\.(?:\w+\.)*Fabric", "fabric"),
    (r"evenstep\.(?:init|World)", "world"),
    (r"torch\.(?:\w+\.)*DataLoader|evenstep\.DataLoader", "loader"),
    (r"evenstep\.DistributedSampler|torch\.utils\.data\.(?:distributed\.)?DistributedSampler", "sampler"),
    (r"(?:evenstep|torch\.nn\.parallel(?:\.distributed)?)\.DistributedDataParallel", "wrapped"),
    (r"torch\.distributed\.fsdp\.FullyShardedDataParallel", "wrapped"),
    (r"(?:evenstep|torch\.nn(?:\.parallel)?)\.DataParallel", "data parallel"),
    (r"evenstep\.(?:ShardedOptimizer|LocalSGD)|torch\.distributed\.optim\.ZeroRedundancyOptimizer", "optimizer"),
    (r"torch\.optim\.lr_scheduler\..*|transformers\.get_\w*schedule\w*", "scheduler"),
    (r"torch\.optim\.(?!swa_utils)(?:\w+\.)*[A-Z]\w*|.*\.(?:AdamW|Lion|Adafactor|LAMB)", "optimizer"),
    (r"(?:\w+\.)+(?:Sharded)?GradScaler", "scaler"),
    (r"(?:\w+\.)+SummaryWriter", "writer"),
    (r"wandb\.init|mlflow\.start_run", "tracker"),
    (r"torch\.device", "device"),
    (r"torch\.utils\.data\.random_split", "items"),
    (r"torchvision\.datasets\..*|torch\.utils\.data\.(?:Tensor|Concat)Dataset|datasets\.load_dataset", "dataset"),
    (r"torch\.utils\.data\.Subset", "subset"),
    (r"torch\.utils\.data\.(?:\w+\.)*BatchSampler", "batches of a sampler"),
    (r"torch\.utils\.data\.(?:\w+\.)*\w*Sampler", "local sampler"),
)
_MADE_NAME = re.compile("|".join(f"({pattern})" for pattern, _ in _MADE))
WRAPPERS = ("wrapped", "data parallel")
# By kind, the last parts of the names of base classes that give a class of the script this kind.
_CLASSES = {
    "stream": {"IterableDataset", "IterDataPipe"},
    "dataset": {"Dataset"},
    "own sampler": {"Sampler", "BatchSampler"},
    "sampler": {"DistributedSampler"},
    "own loader": {"DataLoader"},
    "model": {"Module", "Sequential", "PreTrainedModel"},
}
_MODEL = re.compile(
    r"(?:torchvision\.models|transformers\.Auto|timm\.create_model).*"
    r"|torch\.nn\.(?:\w+\.)*(?!SyncBatchNorm)[A-Z]\w*(?<!Loss)"
)
LAYERS = ("torch.nn.", "torchvision.models", "torch.hub.", "torchvision.ops")
_RANKS = {"RANK": "rank", "LOCAL_RANK": "local rank", "WORLD_SIZE": "world size", "SLURM_PROCID": "rank"}
_RANKS |= {"SLURM_LOCALID": "local rank", "SLURM_NTASKS": "world size", "OMPI_COMM_WORLD_RANK": "rank"}
_RANKS |= {"OMPI_COMM_WORLD_LOCAL_RANK": "local rank", "OMPI_COMM_WORLD_SIZE": "world size"}
_RANK_CALLS = {"get_rank": "rank", "get_world_size": "world size", "get_node_local_rank": "local rank"}
_OF_RANKS = {"rank", "local rank", "world size", "main", "local main", "others"}
_SAME = {"to", "cuda", "cpu", "train", "eval", "float", "double", "half", "bfloat16", "apply", "requires_grad_"}
_SAME |= {"share_memory"}
_SAME_BATCH = _SAME | {"long", "int", "bool", "contiguous", "detach", "clone", "values", "items", "type", "unsqueeze"}
_SAME_BATCH |= {"view", "reshape", "flatten", "squeeze", "pin_memory", "numpy", "reshape_as", "view_as"}
_NO_BATCH = {"shape", "dtype", "device", "ndim", "is_cuda"}
# Functions that return their argument; for a loader, an iterator of its batches.
PASSING = {"iter", "tqdm", "trange", "track", "islice", "compile", "auto"}
_SYNCED = "convert_sync_batchnorm"
# Functions that go through a loader in another way, or keep its batches. A rank passes through all of them unchanged.
_GOING_THROUGH = PASSING | {"enumerate", "cycle", "int", "list", "prefetch", "progress", "float", "bool"}
_GOING_THROUGH |= {"notebook_tqdm", "epochs", "zip", "chain", "map", "CombinedLoader", _SYNCED}
_PREPARES = {"prepare", "prepare_data_loader", "prepare_model", "prepare_optimizer", "prepare_scheduler"}
_PREPARES |= {"setup", "setup_dataloaders", "setup_module", "setup_optimizers"}
_OWN_ATTRIBUTES = {
    ("accelerator", "is_main_process"): "main",
    ("accelerator", "is_local_main_process"): "local main",
    ("accelerator", "is_last_process"): "main",
    ("accelerator", "process_index"): "rank",
    ("accelerator", "local_process_index"): "local rank",
    ("accelerator", "num_processes"): "world size",
    ("accelerator", "device"): "device of this rank",
    ("fabric", "is_global_zero"): "main",
    ("fabric", "global_rank"): "rank",
    ("fabric", "local_rank"): "local rank",
    ("fabric", "world_size"): "world size",
    ("fabric", "device"): "device of this rank",
    ("world", "is_main"): "main",
    ("world", "rank"): "rank",
    ("world", "local_rank"): "local rank",
    ("world", "world_size"): "world size",
    ("world", "device"): "device of this rank",
}
RANK_NAME = re.compile(r"(?:\w*\.)*(?:global_|local_|world_|node_|proc_|dist_|ddp_|my_)?(?:rank|RANK)")
MAIN_NAME = re.compile(
    r"(?:\w*\.)*_?(?:is_)?(?:main|master|chief|primary|rank_?zero|rank_?0|global_zero)(?:_?process|_?rank|_?node)?(?:_only)?"
)
BUILTINS = set(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__)


_NOWHERE = cst.Pass()


@dataclass(frozen=True)
class Value:
    """Something that a script makes, identified by the place where it is made.

    Attributes:
        kind: One of
            "loader", "iterator" (yields a loader's batches one by one), "passed" (goes through the `inner` loaders
            in another way), "batch";
            "object" (of a class of the script, or made by a library), "part" (of the `inner` objects), "wrapped" and
            "data parallel" (around `inner` models), "parameters" (of an object), "state" (dictionary of `inner`);
            "optimizer", "scheduler", "scaler", "writer" (of TensorBoard), "tracker", "dataset", "subset", "sampler",
            "local sampler", "device", "device of this rank", "accelerator", "fabric", "world";
            "items" (tuple, list or dictionary), "function", "class" (of the script);
            "rank", "local rank", "world size", "main" (true on one rank), "local main" (always beside "main": true on
            one rank of each node), "others" (false on one rank);
            "unknown" (the expression may also be something that isn't known).
            site: The call that makes the value. For an iterator or parameters, the call that makes the loader or
            object. For a batch, the expression that is iterated over or passed to `next`. For items, their expression.
            For a function or class, its definition. For other values, a node outside the script.
            definition: The class of an object, if the script defines it.
            inner: The values that this one wraps or contains.
            made_by: For an object that a library made, the full name of the called function or class.
    """

    kind: str
    site: Node = _NOWHERE
    definition: cst.ClassDef | None = None
    inner: frozenset[Value] = frozenset()
    made_by: str = field(default="", compare=False)


Values = frozenset[Value]
NOTHING: Values = frozenset()
_Key = TypeVar("_Key")
_Owner = cst.FunctionDef | File


@functools.cache
def _kind_made(name: str) -> str | None:
    """The kind of value that a library's function or class with this full name makes; None if unknown."""
    match = _MADE_NAME.fullmatch(name)
    return _MADE[match.lastindex - 1][1] if match and match.lastindex else None


def of_kind(values: Values, *kinds: str) -> Values:
    """The values of some kinds."""
    return frozenset(each for each in values if each.kind in kinds)


def loaders_among(values: Values) -> Values:
    """The loaders among values, and those behind iterators."""
    return frozenset(replace(each, kind="loader") for each in of_kind(values, "loader", "iterator"))


def objects_among(values: Values) -> Values:
    """The objects among values, and those that parts belong to and wrappers contain."""
    return of_kind(values, "object").union(*(each.inner for each in of_kind(values, "part", *WRAPPERS)))


class Flow:
    """Follows values through the files of a script.

    Attributes:
        calls: By function of the script, the calls that may run it.
        records, own_functions: By node, the records of calls and of functions.
        prepared: The calls that make loaders which accelerate or Fabric divide among ranks.
        passed: Functions that are passed as arguments, for others to call: in another process, in a thread.
    """

    def __init__(self, files: list[File], modules: dict[str, File]) -> None:
        self._modules = modules
        self._frames = {node: frame for file in files for node, frame in file.frames.items()}
        self._adopted: set[Node] = set()
        self._names: dict[tuple[_Owner, str], Values] = {}
        self._attributes: dict[tuple[cst.ClassDef, str], Values] = {}
        self._returns: dict[cst.FunctionDef, Values] = {}
        self._stored: dict[Node, Values] = {}
        self._instances: dict[cst.ClassDef, Values] = {}
        self._lineages: dict[cst.ClassDef, list[cst.ClassDef]] = {}
        self.calls: dict[cst.FunctionDef, list[cst.Call]] = {}
        self.prepared: set[Node] = set()
        self.passed: set[Function] = set()
        self.records = {each.node: each for file in files for each in file.calls}
        self.own_functions = {each.node: each for file in files for each in file.all_functions}
        self._selves: dict[tuple[_Owner, str], cst.ClassDef] = {
            (each.node, name): each.cls.node
            for each in self.own_functions.values()
            for name in each.parameters[:1]
            if each.cls is not None and each.is_bound
        }
        for file in files:
            for scope, bound in file.bindings.items():
                for name, every in bound.items():
                    own = {Value("function", by) for by in every if type(by) is cst.FunctionDef}
                    own |= {Value("class", by) for by in every if type(by) is cst.ClassDef}
                    self._names[scope or file, name] = frozenset(own)
        classes = [node for node in self._frames if type(node) is cst.ClassDef]
        self._related = {
            each: [other for other in classes if other in self.lineage(each) or each in self.lineage(other)]
            for each in classes
        }
        self._make_optimizers = {
            self._file(node).function(node)
            for node, call in self.records.items()
            if _kind_made(call.name) == "optimizer"
        }
        self._known: dict[Node, Values] = {}
        self._busy: set[Node] = set()  # expressions that are being read: `kept = [kept[k] for k in some]`
        self._open: set[Node] = set()  # busy expressions that were needed again while they were read
        # Follow names first, and only then let calls of unknown names make objects. Otherwise `model(x)` in a function
        # that stands above the line that makes the model would count as a new object.
        for self._knows_names in (False, True):
            self._changed = True
            while self._changed:  # ends, because each round adds values, and their number is finite
                self._changed = False
                self._known.clear()
                for file in files:
                    self._follow(file)

    # ------------------------------------------------------------------ classes

    def lineage(self, definition: cst.ClassDef) -> list[cst.ClassDef]:
        """A class and the script's own classes that it derives from."""
        if definition not in self._lineages:
            found = self._lineages[definition] = [definition]
            for each in found:
                for base in each.bases:
                    found += [own for own in self._classes_at(base.value) if own not in found]
        return self._lineages[definition]

    def base_names(self, definition: cst.ClassDef) -> set[str]:
        """The full names of all base classes, also of those that the script's own base classes derive from."""
        bases = [base.value for each in self.lineage(definition) for base in each.bases]
        return {self._file(each).full_name(each) for each in bases}

    def is_module_class(self, definition: cst.ClassDef | None) -> bool:
        """Whether a class of the script derives from `nn.Module`."""
        names = self.base_names(definition) if definition is not None else ()
        return any(name.startswith("torch.nn.") or name.endswith("Module") for name in names)

    def _classes_at(self, node: Node) -> list[cst.ClassDef]:
        file, own = self._file(node), list[Node]()
        if isinstance(node, cst.Name):
            own = file.bound(node.value, node)
        found = frozenset(Value("class", each) for each in own) or self._imported(file.qualified(node))
        return [each.site for each in found if isinstance(each.site, cst.ClassDef)]

    def kind_of_class(self, definition: cst.ClassDef) -> str:
        """The kind that doctor gives to objects of a class: "model", "dataset" and so on, or "instance"."""
        names = {each.rpartition(".")[2] for each in self.base_names(definition)}
        otherwise = "model" if self.is_module_class(definition) else "instance"
        return next((kind for kind, bases in _CLASSES.items() if names & bases), otherwise)

    def kind_of_object(self, value: Value) -> str:
        """The kind that doctor gives to an object; "" for unknown objects of a library and for other values."""
        if value.kind != "object" or isinstance(value.site, cst.ClassDef):
            return ""
        if value.definition is not None:
            return self.kind_of_class(value.definition)
        return "model" if _MODEL.fullmatch(value.made_by) else ""

    def _method(self, definition: cst.ClassDef, name: str) -> Function | None:
        every = [self._file(each).class_records[each].methods for each in self.lineage(definition)]
        return next((methods[name] for methods in every if name in methods), None)

    def _attribute_of(self, definition: cst.ClassDef, name: str) -> Values:
        """The values that a class, its bases and its subclasses assign to this attribute of their objects."""
        return NOTHING.union(*(self._attributes.get((each, name), NOTHING) for each in self._related[definition]))

    # ------------------------------------------------------------------ following

    def _file(self, node: Node) -> File:
        return self._frames[node].file

    def _add(self, table: dict[_Key, Values], key: _Key, values: Values) -> None:
        known = table.get(key, NOTHING)
        if not values <= known:
            table[key] = known | values
            self._changed = True

    def _follow(self, file: File) -> None:
        for each in file.assignments:
            if each.operator == "=":
                self._bind(each.target, self._each(each.value) if each.each else self._of(each.value))
        for function in file.all_functions:
            returned = [self._of(each) for each in function.returns] + [self._yielded(each) for each in function.yields]
            self._add(self._returns, function.node, NOTHING.union(*returned))
        for call in file.calls:
            self._link(call)
            self._pass(call)

    def _yielded(self, node: cst.Yield) -> Values:
        """The value of a generator with this `yield`: an iterator of a loader, if it yields the loader's batches."""
        file, value = self._file(node), node.value
        if isinstance(value, cst.From):
            return _one_by_one(loaders_among(self._of(value.item)))
        held = [by for name in file.inside(node) for by in file.bound(getattr(name, "value", ""), name)]
        # A batch that was kept from an earlier iteration: the loader has yielded another one since.
        is_kept = any(file.order(by) > file.order(node) for by in held if isinstance(by, cst.Name))
        every = self.parts(Value("items", value)) if isinstance(value, cst.Tuple) else [self._of(value or node)]
        parts = [of_kind(each, "batch") for each in every]
        sites = [each.site for each in NOTHING.union(*parts) if all(parts) and not is_kept]
        sites = [each for each in sites if any(file.is_inside(each, loop) for loop in file.loops(node))]
        found = _one_by_one(NOTHING.union(*(loaders_among(self._of(each)) for each in sites)))
        loops = [each.iter for each in file.loops(node) if isinstance(each, cst.For)]
        inner = NOTHING.union(*(loaders_among(self._of(each)) for each in loops))
        return found or frozenset({Value("passed", inner=inner)} if inner else ())

    def _bind(self, target: Node, values: Values) -> None:
        if not values:
            return
        match target:
            case cst.Name():
                self._add(self._names, (self._owner(target), target.value), values)
            case cst.Tuple() | cst.List():
                for index, each in enumerate(target.elements):
                    self._bind(each.value, NOTHING.union(*(self.part(value, index) for value in values)))
            case cst.StarredElement():
                self._bind(target.value, values)
            case cst.Attribute():
                bases = self._of(target.value)
                for definition in (each.definition for each in bases if each.definition is not None):
                    self._add(self._attributes, (definition, target.attr.value), values)
                if dotted(target) and all(each.definition is None for each in bases):
                    # `model.fc = nn.Linear(...)` of a library's model: `model.fc` stays a part of the model.
                    given = frozenset(each for each in values if each.kind != "object") if bases else values
                    self._add(self._names, (self._owner(target), dotted(target)), given)
            case cst.Subscript():  # models["G"] = ...
                for base in of_kind(self._of(target.value), "items"):
                    self._add(self._stored, base.site, values)

    def _each(self, source: Node) -> Values:
        """The values that the target of a loop over an expression gets."""
        call = self.records[source] if isinstance(source, cst.Call) else None
        if call is not None and call.arguments and call.last in ("tqdm", "track", "progress"):
            return self._each(call.arguments[0])
        is_method = call is not None and call.last == "items" and call.receiver is not None
        if call is not None and (call.last in ("enumerate", "zip") or is_method):
            return frozenset({Value("items", call.node)})
        found = NOTHING
        for value in self._of(source):
            is_loader = value.kind in ("loader", "iterator")
            found |= {Value("batch", source)} if is_loader else self.part(value)
        return found

    def parts(self, value: Value) -> list[Values]:
        """The values of each element of items, also of the tuples that `enumerate`, `zip` or `dict.items` yield."""
        match value.site:
            case cst.Tuple() | cst.List() | cst.Dict():
                return [self._of(each.value) for each in value.site.elements]
            case cst.DictComp():
                return [self._of(value.site.value)]
            case cst.ListComp() | cst.GeneratorExp():
                return [self._of(value.site.elt)]
            case cst.Call():
                call = self.records[value.site]
                given = call.arguments
                if call.last == "items" and call.receiver is not None:
                    return [NOTHING, NOTHING.union(*map(self.part, self._of(call.receiver)))]
                if call.last == "zip":
                    return list(map(self._each, given))
                if call.last == "enumerate":
                    return [NOTHING, self._each(given[0])] if given else []
                if call.last in _PREPARES:
                    return [self._prepared(self._of(each), call.node) for each in given]
                return [frozenset({Value("dataset", call.node)})] * 3  # the parts that `random_split` returns
        return []

    def part(self, value: Value, index: int | None = None) -> Values:
        """The values of all elements of items, or of the element at an index."""
        if value.kind != "items":
            return of_kind(frozenset({value}), "batch")
        parts = self.parts(value)
        if index is not None and index < len(parts) and isinstance(value.site, cst.Tuple | cst.List | cst.Call):
            return parts[index]
        return NOTHING.union(self._stored.get(value.site, NOTHING), *parts)

    def _callees(self, call: cst.Call) -> list[Function]:
        """The script's own functions that a call may run."""
        found, values = list[Function | None](), self._of(call.func)
        for value in values.union(*(each.inner for each in of_kind(values, *WRAPPERS))):
            site, definition = value.site, value.definition
            if value.kind == "class" and isinstance(site, cst.ClassDef):
                self._add(self._instances, site, frozenset({Value("object", call, site)}))
                found.append(self._method(site, "__init__"))
            elif value.kind == "object" and definition is not None:
                found.append(self._method(definition, "forward" if self.is_module_class(definition) else "__call__"))
            elif isinstance(site, cst.FunctionDef):
                found.append(self.own_functions[site])
        return [each for each in found if each is not None]

    def _link(self, call: Call) -> None:
        """Give the values of a call's arguments to the parameters of the functions that it may run."""
        for function in self._callees(call.node):
            known = self.calls.setdefault(function.node, [])
            if call.node not in known:
                known.append(call.node)
                self._changed = True
            names = function.parameters[function.is_bound :]
            for name, argument in arguments(call.node, names).items():
                if name in names:
                    self._add(self._names, (function.node, name), self._of(argument.value))

    def _pass(self, call: Call) -> None:
        """Record functions that are passed as arguments. The parameters of a spawned function get `spawn`'s `args`."""
        named = [each for each in call.arguments if isinstance(each, cst.Name | cst.Attribute)]
        given = call.argument("args")
        for node in {each.site for argument in named for each in self.of(argument, "function")}:
            function = self.own_functions[node]  # type: ignore[index]
            self.passed.add(function)
            if call.last == "spawn":
                parts = [self._of(each.value) for each in given.elements] if isinstance(given, cst.Tuple) else []
                for name, values in zip(function.parameters, [frozenset({Value("rank")}), *parts], strict=False):
                    self._add(self._names, (function.node, name), values)

    # ------------------------------------------------------------------ expressions

    def adopt(self, node: Node, frame: Frame) -> None:
        """Treat an expression that isn't part of the script as if it were in a frame, until a later call moves it."""
        if node in self._frames and node not in self._adopted:
            return
        pending = [node]
        for each in pending:  # the list grows
            self._frames[each] = frame.file.frames[each] = frame
            self._known.pop(each, None)
            if isinstance(each, cst.Call):
                self.records[each] = Call(each, frame)
            pending += each.children
        self._adopted |= {*pending}

    def of(self, node: Node, kind: str | None = None) -> Values:
        """The values that an expression may have, or those of one kind."""
        found = self._of(node)
        return found if kind is None else of_kind(found, kind)

    def _of(self, node: Node) -> Values:
        if node in self._known:
            return self._known[node]
        if node in self._busy:
            self._open.add(node)
            return NOTHING
        self._busy.add(node)
        found = self._read(node)
        self._busy.discard(node)
        self._open.discard(node)
        if not self._open:  # otherwise the result depends on an expression that is still being read
            self._known[node] = found
        return found

    def _read(self, node: Node) -> Values:
        reader = _READERS.get(type(node))
        return reader(self, node) if reader is not None else NOTHING

    def _of_comprehension(self, node: cst.ListComp | cst.GeneratorExp | cst.DictComp) -> Values:
        batches = self.of(node.value if isinstance(node, cst.DictComp) else node.elt, "batch")
        return batches or self.of(node.for_in.iter, "parameters") or frozenset({Value("items", node)})

    def _of_choice(self, node: cst.IfExp) -> Values:
        parts = [(self._of(each), text_of(each)) for each in (node.body, node.orelse)]
        found = parts[0][0] | parts[1][0]
        # If only one branch of `model.module if ddp else model` is known, the result may be something unknown.
        is_unsure = found and any(not held and text not in ("None", "True", "False") for held, text in parts)
        return found | (frozenset({Value("unknown")}) if is_unsure else NOTHING)

    def _of_and_or(self, node: cst.BooleanOperation) -> Values:
        both = self._of(node.left) | self._of(node.right)
        if isinstance(node.operator, cst.And) and of_kind(both, "main", "others"):
            return of_kind(both, "main", "local main", "others")
        return both

    def _of_not(self, node: cst.UnaryOperation) -> Values:
        flipped = {"main": "others", "others": "main", "rank": "main", "local rank": "main"}
        kinds = {each.kind for each in self._of(node.expression)} if isinstance(node.operator, cst.Not) else set()
        return frozenset(Value(flipped[kind]) for kind in kinds & flipped.keys())

    def _owner(self, node: Node) -> _Owner:
        """The function that a name or dotted name is local to, or else its file."""
        file = self._file(node)
        return file.scope(dotted(node).partition(".")[0], node) or file

    def _of_name(self, node: cst.Name) -> Values:
        owner = self._owner(node)
        found, definition = self._names.get((owner, node.value), NOTHING), self._selves.get((owner, node.value))
        if definition is not None:
            below = [held for made, held in self._instances.items() if definition in self.lineage(made)]
            found |= frozenset({Value("object", definition, definition)}).union(*below)
        return found or self._imported(self._file(node).qualified(node)) or _of_rank_name(node.value)

    def _imported(self, name: str | None, depth: int = 8) -> Values:
        """The values of a full name in the module that defines it, also through modules that re-export it."""
        module, _, last = (name or "").rpartition(".")
        owner = self._modules.get(module)
        if owner is None or depth == 0:
            return NOTHING
        found = self._names.get((owner, last), NOTHING)
        return found or (self._imported(owner.imports[last], depth - 1) if last in owner.imports else NOTHING)

    def _of_attribute(self, node: cst.Attribute) -> Values:
        found = self._imported(self._file(node).qualified(node))
        if found:
            return found
        is_self, bases = isinstance(node.value, cst.Name) and node.value.value == "self", self._of(node.value)
        found = found.union(*(self._attribute(base, node.attr.value, is_self=is_self) for base in bases))
        name = dotted(node)
        if name:
            found |= self._names.get((self._owner(node), name), NOTHING)
            found = found if any(each.kind != "part" for each in found) else found | _of_rank_name(name)
        return found

    def _attribute(self, base: Value, name: str, *, is_self: bool) -> Values:
        definition = base.definition
        match base.kind:
            case "batch":
                return frozenset({base}) if name not in _NO_BATCH else NOTHING
            case "part":
                return frozenset({base})
            case "wrapped" | "data parallel":
                return base.inner if name == "module" else NOTHING
            case "accelerator" | "fabric" | "world":
                kind = _OWN_ATTRIBUTES.get((base.kind, name))
                kinds = ("main", "local main") if kind == "local main" else (kind,)
                return frozenset(map(Value, filter(None, kinds)))
            case "loader" if name in ("sampler", "batch_sampler", "dataset") and isinstance(base.site, cst.Call):
                given = self.records[base.site].argument(name)
                return self._of(given) if given is not None else NOTHING
        if base.kind != "object":
            return NOTHING
        if definition is None:
            return frozenset({base if name == "module" else Value("part", inner=frozenset({base}))})
        found, method = frozenset({base}) if name == "module" else NOTHING, self._method(definition, name)
        if method is not None:
            return found | {Value("function", method.node)}
        if self.is_module_class(definition) and not is_self:
            return found | {Value("part", inner=frozenset({base}))}
        return found | self._attribute_of(definition, name)

    def _of_subscript(self, node: cst.Subscript) -> Values:
        index = node.slice[0].slice
        key = index.value if isinstance(index, cst.Index) else None
        if self._file(node).full_name(node.value) == "os.environ":
            return _of_variable(key)
        found = NOTHING
        for base in self._of(node.value):
            if isinstance(base.site, cst.Dict) and base.kind == "items" and isinstance(key, cst.SimpleString):
                pairs = [each for each in base.site.elements if isinstance(each, cst.DictElement)]
                named = [each.value for each in pairs if text_of(each.key) == key.value]
                found |= self._of(named[0]) if named else self.part(base)
            else:
                number = int(key.value) if isinstance(key, cst.Integer) and key.value.isdecimal() else None
                found |= self.part(base, number)
        return found

    def _of_comparison(self, node: cst.Comparison) -> Values:
        """The ranks on which a comparison of a rank holds: "main" for one rank, "others" for all but one."""
        left, (comparison, *others) = node.left, node.comparisons
        if others:
            return NOTHING
        right, operator = comparison.comparator, comparison.operator
        if isinstance(left, cst.Integer | cst.UnaryOperation) and not isinstance(right, cst.Integer):
            left, right = right, left
        kinds = {each.kind for each in self._of(left)}
        if not kinds & {"rank", "local rank"}:
            return NOTHING
        on_main = frozenset({Value("main")} | ({Value("local main")} if kinds == {"local rank"} else set()))
        text = text_of(right)
        if isinstance(operator, cst.In | cst.Is):
            return on_main if re.fullmatch(r"[\[({](?:-1, ?)?0(?:, ?-1)?,?[\])}]|0", text) else NOTHING
        if re.fullmatch(r"\d+", text) or re.search(r"world_size|num_ranks|get_world_size", text):
            if isinstance(operator, cst.Equal) or (isinstance(operator, cst.LessThan) and text == "1"):
                return on_main
            if isinstance(operator, cst.NotEqual) or (isinstance(operator, cst.GreaterThan) and text == "0"):
                return frozenset({Value("others")})
        return on_main if text == "0" and isinstance(operator, cst.LessThanEqual) else NOTHING

    # ------------------------------------------------------------------ calls

    def _of_call(self, node: cst.Call) -> Values:
        call = self.records[node]
        known = self._of_known_call(call)
        if known is None and call.receiver is not None:
            known = self._of_method(call, self._of(call.receiver))
        if known is not None:
            return known
        is_through = call.last in _GOING_THROUGH
        callees, qualified, first = self._of(node.func), self._file(node).qualified(node.func), call.positional(0)
        if call.last in PASSING and isinstance(node.func, cst.Name):  # the script's own `tqdm`, if not installed
            return self._through(call, is_passing=True)
        found = NOTHING.union(*(self._result(each, node) for each in callees))
        if found or (of_kind(callees, "function", "class") and not is_through):
            return found
        if call.last == "next" and first is not None and loaders_among(self._of(first)):
            return frozenset({Value("batch", first)})
        if call.last in ("map", "filter") and len(node.args) > 1:
            return _one_by_one(self._of(node.args[1].value))
        if is_through:
            return self._through(call, is_passing=qualified is not None and call.last in (*PASSING, _SYNCED))
        if callees or not self._makes_object(node, qualified):
            return NOTHING
        return frozenset({Value("object", node, made_by=qualified or "")})

    def _makes_object(self, node: cst.Call, qualified: str | None) -> bool:
        """Whether a call may make an object: it calls a library, or a name of the script that isn't understood."""
        if qualified is not None:
            is_layer = qualified.startswith(LAYERS) and not qualified.startswith("torch.nn.functional")
            return is_layer or not qualified.startswith("torch")
        if not isinstance(node.func, cst.Name):  # `models["net"]()`
            return self._knows_names and not isinstance(node.func, cst.Attribute)
        if not self._knows_names or node.func.value in BUILTINS:
            return False
        by = self._file(node).bound(node.func.value, node)
        return not all(isinstance(each, cst.Param) for each in by) if by else self._file(node).has_stars

    def _through(self, call: Call, *, is_passing: bool) -> Values:
        values = NOTHING.union(*map(self._of, call.arguments))
        inner = loaders_among(values).union(*(each.inner for each in of_kind(values, "passed")))
        if is_passing:
            return _one_by_one(values)
        kept = of_kind(values, *_OF_RANKS) if len(call.arguments) == 1 else NOTHING
        return kept | (frozenset({Value("passed", inner=inner)}) if inner else NOTHING)

    def _of_known_call(self, call: Call) -> Values | None:
        """The values that a call of a library returns; None if the call isn't known."""
        kind, first = _kind_made(call.name), call.positional(0)
        if kind in WRAPPERS:
            given = call.argument("module", 0)
            return frozenset(
                {Value(kind, call.node, inner=_unwrapped(self._of(given)) if given is not None else NOTHING)}
            )
        if kind == "batches of a sampler":
            drawn = call.argument("sampler", 0)
            return NOTHING if drawn is None else of_kind(self._of(drawn), "sampler", "local sampler", "object")
        if kind is not None:
            return frozenset({Value(kind, call.node)})
        if call.name in ("os.environ.get", "os.getenv") and first is not None:
            return _of_variable(first)
        if call.last in _RANK_CALLS and not of_kind(self._of(call.node.func), "function"):
            return frozenset({Value(_RANK_CALLS[call.last])})
        return None

    def _of_method(self, call: Call, receiver: Values) -> Values | None:
        """The values that a method of a known object returns; None if the method isn't known."""
        last, objects = call.last, objects_among(receiver)
        batches = of_kind(receiver, "batch")
        if batches:
            return batches if last in _SAME_BATCH else NOTHING
        if of_kind(receiver, "accelerator", "fabric"):
            if last in _PREPARES and len(call.arguments) == 1:
                return self._prepared(self._of(call.arguments[0]), call.node)
            if last in _PREPARES:
                return frozenset({Value("items", call.node)})
            if last == "unwrap_model" and call.arguments:
                return _unwrapped(self._of(call.arguments[0]))
        if objects and last in ("parameters", "named_parameters"):
            return frozenset(replace(each, kind="parameters") for each in objects)
        own = any(each.definition is not None and self._method(each.definition, last) for each in objects)
        if objects and last in _SAME and not own:
            return receiver
        if last == "state_dict" and receiver:
            inner = frozenset(each for each in receiver if each.kind != "state")
            return frozenset({Value("state", call.node, inner=inner)})
        if of_kind(receiver, "items") and last in ("values", "items"):
            return receiver
        if last in _GOING_THROUGH:  # `bar.track(loader)`; but `loader.epochs(3)` are numbers
            return NOTHING if of_kind(receiver, "loader") else None
        return NOTHING if objects and all(each.definition is None for each in objects) else None

    def _prepared(self, values: Values, site: Node) -> Values:
        """The values that accelerate or Fabric return for values: models are wrapped, loaders divided among ranks."""
        self.prepared |= {each.site for each in of_kind(values, "loader")}
        return frozenset(
            Value("wrapped", site, inner=frozenset({each}))
            if self.kind_of_object(each) in ("model", "instance")
            else each
            for each in values
        )

    def _result(self, value: Value, call: cst.Call) -> Values:
        """The values that a call of one of the script's own functions, classes or objects returns."""
        match value.kind, value.site:
            case "class", cst.ClassDef() as definition:
                is_writer = any(name.endswith("SummaryWriter") for name in self.base_names(definition))
                return frozenset({Value("writer" if is_writer else "object", call, definition)})
            case "function", cst.FunctionDef() as function:
                returned = self._returns.get(function, NOTHING)
                return frozenset(self._made_for(each, function, call) for each in returned)
            case "object", _ if value.definition is not None and not self.is_module_class(value.definition):
                method = self._method(value.definition, "__call__")
                return self._result(Value("function", method.node), call) if method is not None else NOTHING
        return NOTHING

    def _made_for(self, value: Value, function: cst.FunctionDef, call: cst.Call) -> Value:
        """A returned value. If the function made the object, the call counts as its maker."""
        inner = frozenset(self._made_for(each, function, call) for each in value.inner)
        is_made_there = (
            value.kind == "object"
            and self._file(value.site) is self._file(function)
            and self._file(function).is_inside(value.site, function)
            and function not in self._make_optimizers
        )
        return replace(value, inner=inner, site=call if is_made_there else value.site)


_READERS: dict[type[Node], Callable[[Flow, Any], Values]] = {
    cst.Name: Flow._of_name,
    cst.Attribute: Flow._of_attribute,
    cst.Call: Flow._of_call,
    cst.Subscript: Flow._of_subscript,
    cst.Comparison: Flow._of_comparison,
    cst.IfExp: Flow._of_choice,
    cst.BooleanOperation: Flow._of_and_or,
    cst.UnaryOperation: Flow._of_not,
    cst.BinaryOperation: lambda flow, node: flow.of(node.left, "parameters") | flow.of(node.right, "parameters"),
    cst.NamedExpr: lambda flow, node: flow._of(node.value),
    cst.Await: lambda flow, node: flow._of(node.expression),
    cst.DictComp: Flow._of_comprehension,
    cst.ListComp: Flow._of_comprehension,
    cst.GeneratorExp: Flow._of_comprehension,
    **dict.fromkeys((cst.Tuple, cst.List, cst.Dict), lambda flow, node: frozenset({Value("items", node)})),
}


def arguments(call: cst.Call, names: Iterable[str]) -> dict[str, cst.Arg]:
    """The arguments of a call by name. `names` are the function's parameters, in order."""
    positional, is_known = list(names), True
    found: dict[str, cst.Arg] = {}
    for index, argument in enumerate(call.args):
        is_known = is_known and argument.star != "*"  # `*args` may be any number of arguments
        if argument.keyword is not None:
            found[argument.keyword.value] = argument
        elif is_known and not argument.star and index < len(positional):
            found[positional[index]] = argument
    return found


def _one_by_one(values: Values) -> Values:
    """Values, with each loader replaced by an iterator of its batches."""
    return frozenset(replace(each, kind="iterator") if each.kind == "loader" else each for each in values)


def _unwrapped(values: Values) -> Values:
    """Values, with each wrapper replaced by the model inside."""
    plain = frozenset(each for each in values if each.kind not in WRAPPERS)
    return plain.union(*(each.inner for each in of_kind(values, *WRAPPERS)))


def _of_variable(name: Node | None) -> Values:
    kind = _RANKS.get(text_of(name).strip("\"'"))
    return frozenset({Value(kind)}) if kind else NOTHING


def _of_rank_name(name: str) -> Values:
    """The value that a variable's name alone suggests: a rank, or whether this is the main rank."""
    if RANK_NAME.fullmatch(name):
        return frozenset({Value("local rank" if "local" in name.lower() else "rank")})
    return frozenset({Value("main")}) if name != "main" and MAIN_NAME.fullmatch(name) else NOTHING
