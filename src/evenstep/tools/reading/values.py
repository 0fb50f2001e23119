"""What the names of a script stand for: loaders, samplers, models, optimizers, ranks.

Every assignment, parameter and attribute is followed until nothing changes, without regard to order: a name stands for
all that it is ever given. What isn't known stands for nothing, and rules keep silent about it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from evenstep.tools.reading.program import Assignment, Call, Class, File, Frame, Function, dotted, text_of

MOST_ROUNDS = 8

_EXACT = {
    "accelerate.Accelerator": "accelerator",
    "evenstep.init": "world",
    "evenstep.World": "world",
    "evenstep.DataLoader": "loader",
    "evenstep.DistributedSampler": "sampler",
    "evenstep.DistributedDataParallel": "wrapped",
    "evenstep.DataParallel": "data parallel",
    "evenstep.ShardedOptimizer": "optimizer",
    "evenstep.LocalSGD": "optimizer",
    "wandb.init": "tracker",
    "mlflow.start_run": "tracker",
    "tensorboardX.SummaryWriter": "tracker",
    "torch.utils.data.DataLoader": "loader",
    "torch.utils.data.random_split": "datasets",
    "torch.utils.data.distributed.DistributedSampler": "sampler",
    "torch.utils.data.DistributedSampler": "sampler",
    "torch.nn.parallel.DistributedDataParallel": "wrapped",
    "torch.nn.parallel.distributed.DistributedDataParallel": "wrapped",
    "torch.distributed.fsdp.FullyShardedDataParallel": "wrapped",
    "torch.nn.DataParallel": "data parallel",
    "torch.nn.parallel.DataParallel": "data parallel",
    "torch.utils.tensorboard.SummaryWriter": "tracker",
    "torch.device": "device",
    "torch.distributed.optim.ZeroRedundancyOptimizer": "optimizer",
    "datasets.load_dataset": "dataset",
}
_MADE = [
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"(?:lightning|lightning_fabric|pytorch_lightning)\.(?:\w+\.)*Fabric", "fabric"),
        (r"torch\.optim\.(?:\w+\.)*[A-Z]\w*", "optimizer"),
        (r"torch\.(?:\w+\.)*(?:Sharded)?GradScaler", "scaler"),
        (r"(?:torchvision\.models|transformers\.Auto|timm\.create_model).*", "model"),
        (r"torchvision\.datasets\..*|torch\.utils\.data\.(?:Tensor|Concat)Dataset", "dataset"),
        (r"torch\.utils\.data\.Subset", "subset"),
        (r"torch\.nn\.(?:\w+\.)*(?!SyncBatchNorm)[A-Z]\w*(?<!Loss)", "model"),
        (r"torch\.utils\.data\.(?:\w+\.)*\w*Sampler", "local sampler"),
    )
]
_RANKS = {"RANK": "rank", "LOCAL_RANK": "local rank", "WORLD_SIZE": "world size", "SLURM_PROCID": "rank"}
_RANKS |= {"SLURM_LOCALID": "local rank", "SLURM_NTASKS": "world size", "OMPI_COMM_WORLD_RANK": "rank"}
_RANKS |= {"OMPI_COMM_WORLD_LOCAL_RANK": "local rank", "OMPI_COMM_WORLD_SIZE": "world size"}
_SAME = {"to", "cuda", "cpu", "train", "eval", "half", "float", "double", "bfloat16", "share_memory", "requires_grad_"}
_THROUGH = {"tqdm", "trange", "enumerate", "iter", "islice", "cycle", "int", "track", "compile", "list", "prefetch"}
_THROUGH |= {"convert_sync_batchnorm", "progress", "float", "bool", "notebook_tqdm", "epochs"}
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
_CLASSES = {  # by kind, the last names of classes that one of the script's own derives from
    "stream": {"IterableDataset", "IterDataPipe"},
    "dataset": {"Dataset"},
    "own sampler": {"Sampler", "BatchSampler"},
    "sampler": {"DistributedSampler"},
    "own loader": {"DataLoader"},
    "model": {"Module", "Sequential", "PreTrainedModel"},
}
_RANK_CALLS = {"get_rank": "rank", "get_world_size": "world size", "get_node_local_rank": "local rank"}
RANK_NAME = re.compile(r"(?:\w*\.)*(?:global_|local_|world_|node_|proc_|dist_|ddp_|my_)?(?:rank|RANK)")
MAIN_NAME = re.compile(
    r"(?:\w*\.)*_?(?:is_)?(?:main|master|chief|primary|rank_?zero|rank_?0|global_zero)(?:_?process|_?rank|_?node)?(?:_only)?"
)


@dataclass(frozen=True)
class Thing:
    """What a name may stand for.

    Attributes:
        kind: "loader", "sampler", "dataset", "stream", "model", "wrapped", "data parallel", "optimizer", "scheduler",
            "scaler", "tracker", "rank", "local rank", "world size", "main" (true on one rank), "local main" (beside it:
            true on one of each node), "others" (false on one rank), "device", "accelerator", "fabric", "world",
            "state", "instance", "tuple", "unknown" (perhaps something else).
        site: The call that made it.
        inner: What it was made of: the model in a wrapper, the objects of a state dictionary.
        cls: Of an instance or a model, its class, if it is the script's own.
        items: Of a tuple, what each of its elements stands for.
    """

    kind: str
    site: Call | None = None
    inner: frozenset[Thing] = frozenset()
    cls: Class | None = None
    items: tuple[frozenset[Thing], ...] = ()


Things = frozenset[Thing]
NOTHING: Things = frozenset()


class Values:
    """What all names of a program stand for."""

    def __init__(self, files: list[File], modules: dict[str, File]) -> None:
        self.files = files
        self._modules = modules
        self._records = {id(each.node): each for file in files for each in file.calls}
        self._known: dict[tuple[int, str], set[Thing]] = {}
        self._bound: dict[int, set[str]] = {}
        self._asked: dict[tuple[int, int], Things] = {}
        self._assignments: list[tuple[Assignment, str]] = []
        self.prepared: set[Call] = set()  # loaders that accelerate or Fabric divide among ranks
        self.called_from: dict[Function, list[Call]] = {}
        self.passed: set[Function] = set()  # given to somebody else to call: on a rank of its own, in a thread
        self._targets: dict[Call, list[Function]] = {}
        for file in files:
            for assignment in file.assignments:
                for name in _names_of(assignment.target):
                    owner = assignment.frame.function or file
                    if "." not in name:
                        self._bound.setdefault(id(owner), set()).add(name)
            for function in file.all_functions:
                self._bound.setdefault(id(function), set()).update(function.parameters)
        self._settle()

    # --- asking ---

    def of(self, node: cst.CSTNode | None, frame: Frame) -> Things:
        """What an expression may stand for."""
        # Each part of `a.b().c()` is asked for by all that it is a part of: without this twice as often a level deeper.
        key = id(node), id(frame.function or frame.file)
        if key not in self._asked:
            self._asked[key] = self._of(node, frame)
        return self._asked[key]

    def _of(self, node: cst.CSTNode | None, frame: Frame) -> Things:
        match node:
            case cst.Name() | cst.Attribute():
                return self._of_name(node, frame)
            case cst.Call():
                return self._of_call(node, frame)
            case cst.Tuple() | cst.List():
                items = tuple(self.of(each.value, frame) for each in node.elements)
                return frozenset({Thing("tuple", items=items)}) if any(items) else NOTHING
            case cst.Dict():
                values = tuple(self.of(each.value, frame) for each in node.elements)
                return frozenset({Thing("dict", items=values)}) if any(values) else NOTHING
            case cst.IfExp():
                branches = [self.of(each, frame) for each in (node.body, node.orelse)]
                known = [each for each in (node.body, node.orelse) if text_of(each) in ("None", "True", "False")]
                # Of `model.module if ddp else model` one may be known, and it may be the other.
                is_unsure = any(branches) and not all(branches) and not known
                return branches[0] | branches[1] | ({Thing("unknown")} if is_unsure else NOTHING)
            case cst.BooleanOperation():
                left, right = self.of(node.left, frame), self.of(node.right, frame)
                if isinstance(node.operator, cst.And) and _kinds(left | right) & {"main", "others"}:
                    return frozenset(each for each in left | right if each.kind in ("main", "local main", "others"))
                return left | right
            case cst.UnaryOperation() if isinstance(node.operator, cst.Not):
                kinds = _kinds(self.of(node.expression, frame))
                return frozenset(
                    Thing(flipped)
                    for kind, flipped in (
                        ("main", "others"),
                        ("others", "main"),
                        ("rank", "main"),
                        ("local rank", "main"),
                    )
                    if kind in kinds
                )
            case cst.Comparison() if len(node.comparisons) == 1:
                return self._of_comparison(node, frame)
            case cst.Subscript():
                name = dotted(node.value)
                if name and frame.file.resolve(name) == "os.environ":
                    return _of_variable(text_of(node.slice[0].slice))
                found = self.of(node.value, frame)
                index = text_of(node.slice[0].slice)
                picked: set[Thing] = set()
                for each in found:
                    if each.kind == "tuple" and index.isdecimal() and int(index) < len(each.items):
                        picked |= each.items[int(index)]
                    elif each.kind == "tuple":
                        picked |= frozenset().union(*each.items)
                return frozenset(picked)
            case cst.NamedExpr():
                return self.of(node.value, frame)
            case cst.Await():
                return self.of(node.expression, frame)
        return NOTHING

    def kinds(self, node: cst.CSTNode | None, frame: Frame) -> set[str]:
        """The kinds of what an expression may stand for."""
        return _kinds(self.of(node, frame))

    def record(self, node: cst.Call) -> Call | None:
        """The record of a call node."""
        return self._records.get(id(node))

    def functions_of(self, call: Call) -> list[Function]:
        """The script's own functions and methods that a call may run."""
        return self._targets.get(call, [])

    def class_named(self, name: str, file: File) -> Class | None:
        """The script's own class of a resolved name."""
        owner, last = self._owner(name, file)
        return owner.classes.get(last) if owner is not None else None

    def _owner(self, name: str, file: File) -> tuple[File | None, str]:
        """The file that has what a resolved name stands for, and its name there, by way of files that import it."""
        for _ in range(MOST_ROUNDS):
            module, _, last = name.rpartition(".")
            owner = self._modules.get(module) if module else file
            if owner is None or last not in owner.imports or last in owner.functions or last in owner.classes:
                return owner, last
            name, file = owner.imports[last], owner
        return None, ""

    def _function_named(self, name: str, file: File) -> Function | None:
        owner, last = self._owner(name, file) if name else (None, "")
        return owner.functions.get(last) if owner is not None else None

    def is_kind_of(self, cls: Class, bases: set[str]) -> bool:
        """True if a class derives from one with such a last name, perhaps by way of another class of the script."""
        seen: set[int] = set()
        pending = [cls]
        while pending:
            each = pending.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            for base in each.bases:
                if base.rpartition(".")[2] in bases:
                    return True
                own = self.class_named(base, each.file)
                if own is not None:
                    pending.append(own)
        return False

    # --- following ---

    def _settle(self) -> None:
        known = -1
        for _ in range(MOST_ROUNDS):
            before, known = known, sum(map(len, (*self._known.values(), *self._targets.values()))) + len(self.prepared)
            if known == before:
                break
            self._asked.clear()
            for file in self.files:
                for assignment in file.assignments:
                    self._assign(assignment)
                for function in file.all_functions:
                    self._return(function)
                for call in file.calls:
                    self._bind(call)
        self._asked.clear()
        for call, functions in self._targets.items():
            for function in functions:
                self.called_from.setdefault(function, []).append(call)

    def _return(self, function: Function) -> None:
        """What a function returns, as far as is known; of a generator, the loader that it goes through."""
        inside = Frame("function", None, function.file, function)
        returned = {each for value in function.returns for each in self.of(value, inside)}
        if function.yields:
            loops = [loop for loop in function.file.loops if loop.frame.function is function]
            iterated = {each for loop in loops for each in self.of(loop.iterates, loop.frame)}
            returned |= {each for each in iterated if each.kind == "loader"}
        if returned:
            self._known.setdefault((id(function), "return"), set()).update(returned)

    def _assign(self, assignment: Assignment) -> None:
        if assignment.operator != "=":
            return
        values = self.of(assignment.value, assignment.frame)
        if assignment.each:
            # Of a loop over a loader nothing is known but of loops over tuples of objects.
            values = frozenset().union(*[item for each in values if each.kind == "tuple" for item in each.items])
        self._store(assignment.target, values, assignment.frame)

    def _store(self, target: cst.CSTNode, values: Things, frame: Frame) -> None:
        if not values:
            return
        if isinstance(target, cst.Tuple | cst.List):
            for position, element in enumerate(target.elements):
                for each in values:
                    if each.kind == "tuple" and position < len(each.items):
                        self._store(element.value, each.items[position], frame)
            return
        if isinstance(target, cst.Subscript):
            return
        name = dotted(target)
        if name:
            for key in self._keys(name, frame):
                self._known.setdefault(key, set()).update(values)
                break

    def _keys(self, name: str, frame: Frame) -> list[tuple[int, str]]:
        """Where a name may be kept: the class for `self.x`, else the scope of its first part."""
        first, _, rest = name.partition(".")
        function = frame.function
        while function is not None:
            if first == "self" and function.cls is not None and rest:
                classes, keys = [function.cls], []
                while classes:
                    cls = classes.pop(0)
                    keys.append((id(cls), rest))
                    for base in cls.bases:
                        own = self.class_named(base, cls.file)
                        if own is not None and (id(own), rest) not in keys:
                            classes.append(own)
                return keys
            if first in self._bound.get(id(function), ()):
                return [(id(function), name)]
            function = function.frame.function
        return [(id(frame.file), name)]

    def _of_name(self, node: cst.CSTNode, frame: Frame) -> Things:
        name = dotted(node)
        if name:
            for key in self._keys(name, frame):
                if key in self._known:
                    return frozenset(self._known[key])
            owner, last = self._owner(frame.file.resolve(name), frame.file)
            if owner is not None and owner is not frame.file:
                return frozenset(self._known.get((id(owner), last), ()))
        if isinstance(node, cst.Attribute):
            attribute = str(node.attr.value)
            found: set[Thing] = set()
            for each in self.of(node.value, frame):
                kind = _OWN_ATTRIBUTES.get((each.kind, attribute))
                if kind is not None:
                    found |= {Thing(kind), Thing(kind.removeprefix("local ") if kind == "local main" else kind)}
                elif attribute == "module" and each.kind in ("wrapped", "data parallel"):
                    found |= each.inner
                elif attribute in ("sampler", "batch_sampler", "dataset") and each.kind == "loader" and each.site:
                    found |= self.of(each.site.argument(attribute), each.site.frame)
                elif each.kind == "instance" and each.cls is not None:
                    found |= self._known.get((id(each.cls), attribute), set())
            if found:
                return frozenset(found)
        if name:
            if RANK_NAME.fullmatch(name):
                return frozenset({Thing("local rank" if "local" in name.lower() else "rank")})
            if MAIN_NAME.fullmatch(name) and name != "main":
                return frozenset({Thing("main")})
        return NOTHING

    def _of_comparison(self, node: cst.Comparison, frame: Frame) -> Things:
        left, comparison = node.left, node.comparisons[0]
        right, operator = comparison.comparator, comparison.operator
        if isinstance(left, cst.Integer | cst.UnaryOperation) and not isinstance(right, cst.Integer):
            left, right = right, left
        kinds = self.kinds(left, frame)
        if not kinds & {"rank", "local rank"}:
            return NOTHING
        on_main = frozenset({Thing("main")} | ({Thing("local main")} if kinds == {"local rank"} else set()))
        text = text_of(right)
        if isinstance(operator, cst.In | cst.Is):
            return on_main if re.fullmatch(r"[\[({](?:-1, ?)?0(?:, ?-1)?,?[\])}]|0", text) else NOTHING
        if re.fullmatch(r"\d+", text) or re.search(r"world_size|num_ranks|get_world_size", text):
            if isinstance(operator, cst.Equal):
                return on_main
            if isinstance(operator, cst.NotEqual) or (isinstance(operator, cst.GreaterThan) and text == "0"):
                return frozenset({Thing("others")})
            if isinstance(operator, cst.LessThan) and text == "1":
                return on_main
        if text == "0" and isinstance(operator, cst.LessThanEqual):
            return on_main
        return NOTHING

    def _of_call(self, node: cst.Call, frame: Frame) -> Things:
        call = self._call_of(node, frame)
        name, last = call.name, call.last
        known = self._of_known_call(call)
        if known is not None:
            return known
        if isinstance(node.func, cst.Attribute):
            found = self._of_method(call, self.of(node.func.value, frame))
            if found is not None:
                return found
        cls = self.class_named(name, frame.file) if name else None
        if cls is not None:
            return frozenset({Thing(self._kind_of_class(cls), call, cls=cls)})
        if last in _THROUGH and node.args:
            return self.of(node.args[0].value, frame)
        if last in ("zip", "chain", "map", "CombinedLoader"):
            found_inside = [each for argument in call.arguments for each in self.of(argument, frame)]
            return frozenset(each for each in found_inside if each.kind == "loader")
        returned: set[Thing] = set()
        for function in self._functions(call):
            returned |= self._known.get((id(function), "return"), set())
        return frozenset(returned)

    def _of_known_call(self, call: Call) -> Things | None:
        """What a call of a library makes; None if it isn't known."""
        name, last = call.name, call.last
        kind = _EXACT.get(name)
        if kind in ("wrapped", "data parallel", "optimizer", "datasets"):
            inner = self.of(call.positional(0) or call.argument("module"), call.frame)
            if kind == "datasets":
                part = frozenset({Thing("dataset", call)})
                return frozenset({Thing("tuple", items=(part, part, part))})
            return frozenset({Thing(kind, call, inner)})
        if kind is not None:
            return frozenset({Thing(kind, call)})
        if name in ("os.environ.get", "os.getenv") and call.node.args:
            return _of_variable(text_of(call.node.args[0].value))
        if last in _RANK_CALLS and not self._functions(call):
            return frozenset({Thing(_RANK_CALLS[last])})
        if name.startswith("torch.optim.lr_scheduler.") or (
            name.startswith("transformers.get_") and "schedule" in name
        ):
            return frozenset({Thing("scheduler", call, self.of(call.positional(0), call.frame))})
        if name.startswith("torch.utils.data.") and last == "BatchSampler":
            drawn = self.of(call.argument("sampler", 0), call.frame)
            return frozenset(each for each in drawn if each.kind.endswith("sampler"))
        kind = next((kind for pattern, kind in _MADE if pattern.fullmatch(name)), None)
        return None if kind is None else frozenset({Thing(kind, call)})

    def _of_method(self, call: Call, receiver: Things) -> Things | None:
        """What a method of a known object returns; None if it isn't known."""
        kinds, last, arguments = _kinds(receiver), call.last, call.arguments
        makers = kinds & {"accelerator", "fabric"}
        if makers and last in _PREPARES:
            items = tuple(self._prepared(self.of(each, call.frame), call) for each in arguments)
            return items[0] if len(items) == 1 else frozenset({Thing("tuple", items=items)})
        if makers and last == "unwrap_model":
            found = self.of(call.positional(0), call.frame)
            return frozenset(inner for each in found for inner in (each.inner if each.kind == "wrapped" else [each]))
        if last in _SAME and kinds & {"model", "wrapped", "data parallel", "instance"}:
            own = [each for each in receiver if each.kind == "instance" and each.cls and last in each.cls.methods]
            return None if own else receiver
        if last == "state_dict" and receiver:
            return frozenset({Thing("state", call, receiver)})
        if kinds & {"loader"} and last in ("epochs",):
            return NOTHING
        return None

    def _prepared(self, found: Things, call: Call) -> Things:
        prepared: set[Thing] = set()
        for each in found:
            if each.kind in ("model", "instance"):
                prepared.add(Thing("wrapped", call, frozenset({each})))
            else:
                if each.kind == "loader" and each.site is not None:
                    self.prepared.add(each.site)
                prepared.add(each)
        return frozenset(prepared)

    def _kind_of_class(self, cls: Class) -> str:
        return next((kind for kind, bases in _CLASSES.items() if self.is_kind_of(cls, bases)), "instance")

    def _call_of(self, node: cst.Call, frame: Frame) -> Call:
        """The record of a call node."""
        return self._records.get(id(node)) or Call(node, frame.file.resolve(dotted(node.func)), frame, 0, 0)

    def _functions(self, call: Call) -> list[Function]:
        """The script's own functions that a call names, or that are methods of what it is called on."""
        name, file = call.name, call.frame.file
        found: list[Function] = []
        own = self._function_named(name, file)
        if own is not None:
            return [own]
        cls = self.class_named(name, file) if name else None
        if cls is not None:
            method = self._method(cls, "__init__")
            return [method] if method else []
        receiver = call.receiver
        if receiver is None:
            for each in self.of(call.node.func, call.frame):  # an object that is called
                if each.kind == "instance" and each.cls is not None and (method := self._method(each.cls, "__call__")):
                    found.append(method)
            return found
        text, function = dotted(receiver), call.frame.function
        while function is not None and function.cls is None:
            function = function.frame.function
        if text == "self" and function is not None and function.cls is not None:
            method = self._method(function.cls, call.last)
            return [method] if method else []
        for each in self.of(receiver, call.frame):
            # A wrapped model's own methods are reached through the wrapper, too; so far as they are ours.
            if each.cls is not None and (method := self._method(each.cls, call.last)):
                found.append(method)
        return found

    def _method(self, cls: Class, name: str) -> Function | None:
        pending, seen = [cls], set[int]()
        while pending:
            each = pending.pop(0)
            if id(each) in seen:
                continue
            seen.add(id(each))
            if name in each.methods:
                return each.methods[name]
            pending += [own for base in each.bases if (own := self.class_named(base, each.file)) is not None]
        return None

    def _bind(self, call: Call) -> None:
        """Give the parameters of the functions that a call runs what its arguments stand for."""
        functions = self._functions(call)
        if functions:
            self._targets[call] = functions
        for function in functions:
            parameters = list(function.parameters)
            if function.cls is not None and parameters and "staticmethod" not in function.decorators:
                parameters = parameters[1:]
            position = 0
            for each in call.node.args:
                if each.star:
                    break
                if each.keyword is not None:
                    parameter: str | None = str(each.keyword.value)
                else:
                    parameter = parameters[position] if position < len(parameters) else None
                    position += 1
                if parameter in function.parameters:
                    self._known.setdefault((id(function), str(parameter)), set()).update(
                        self.of(each.value, call.frame)
                    )
        for each in call.node.args:
            if isinstance(each.value, cst.Name | cst.Attribute):
                self._pass(call, each)

    def _pass(self, call: Call, argument: cst.Arg) -> None:
        name = call.frame.file.resolve(dotted(argument.value))
        function = self._function_named(name, call.frame.file)
        if function is None:
            return
        if isinstance(argument.value, cst.Name) and argument.value.value in self._bound.get(
            id(call.frame.function), ()
        ):
            return
        self.passed.add(function)
        if call.last == "spawn" and function.parameters:
            self._known.setdefault((id(function), function.parameters[0]), set()).add(Thing("rank"))
            given = call.argument("args")
            if isinstance(given, cst.Tuple):
                for parameter, element in zip(function.parameters[1:], given.elements, strict=False):
                    self._known.setdefault((id(function), parameter), set()).update(self.of(element.value, call.frame))


def _kinds(things: Things) -> set[str]:
    return {each.kind for each in things}


def _of_variable(text: str) -> Things:
    kind = _RANKS.get(text.strip("\"'"))
    return frozenset({Thing(kind)}) if kind else NOTHING


def _names_of(target: cst.CSTNode) -> list[str]:
    if isinstance(target, cst.Tuple | cst.List):
        return [name for element in target.elements for name in _names_of(element.value)]
    return [dotted(target)] if isinstance(target, cst.Name | cst.Attribute) else []
