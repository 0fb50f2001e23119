"""On which ranks, in which loops and how often calls run, followed through the script's own functions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import libcst as cst

from evenstep.tools.reading.looked import Facts, Looked
from evenstep.tools.reading.program import read_program
from evenstep.tools.reading.tree import Call, File, Frame, Function, Loop, dotted, shortened, text_of
from evenstep.tools.reading.values import NOTHING, Flow, Value, Values

# A condition with such words may depend on the rank, even if the values that it compares aren't known.
_RANKISH = re.compile(
    r"(?i)rank|is_?main|main_?process|is_?master|master_?process|primary|chief|global_zero|process_index|verbose|\bmaster\b"
    r"|\bgpu\b|is_?first|world_size *==|== *world_size|should_(?:log|save|print)"
)
_RANK_ZERO_DECORATORS = ("rank_zero_only", "on_main_process", "main_process_only", "master_only", "rank0_only")
_LIBRARIES = ("evenstep", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "deepspeed", "horovod")
_OF_TORCH = ("torch.distributed", "torch.nn.parallel.Distributed", "torch.nn.parallel.distributed")
_UNSEEN = ("batch", "parameters", "part", "passed", "function", "class")  # kinds that no rule asks for
_SEEN_AS = {"iterator": "loader", "writer": "tracker", "items": "tuple"}
_SINGLE = re.compile(r"not (?:\w+\.)*(?:is_)?(?:distributed|ddp|is_initialized\(\))|world_size *== *1|world_size *< *2")
_LOADER_NAME = re.compile(r"(?i)(?:\w+\.)*\w*(?:loader|dataloader|_dl|batches|_iter)\w*")
_MOST_UNKNOWN = 4  # reported pieces of code that aren't understood
OPTIMIZER_NAME = re.compile(r"(?i)(?:\w+\.)*(?:\w*optim\w*|opt|opt_\w+|\w+_opt|\w*optimizer\w*)")


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _once(meanwhile: Any) -> Callable[[_Method], _Method]:
    """Cache the results of a method of `Script`. A recursive call with the same arguments gets `meanwhile`."""

    def kept(method: _Method) -> _Method:
        @functools.wraps(method)
        def ask(script: Script, *asked: Any) -> Any:
            key = (method, *asked)
            if key not in script.answers:
                script.answers[key] = meanwhile
                script.answers[key] = method(script, *asked)
            return script.answers[key]

        return cast(_Method, ask)

    return kept


class Script:
    """A parsed script: its files, what its names stand for, and where its calls run."""

    def __init__(self, path: Path) -> None:
        self.files, modules, self.notes = read_program(path)
        self.flow = Flow(self.files, modules)
        self.calls = [call for file in self.files for call in file.calls]
        self.loops = [loop for file in self.files for loop in file.all_loops]
        self._loop_of = {loop.frame: loop for loop in self.loops}
        self.answers: dict[tuple[Any, ...], Any] = {}  # see `_once`
        self.prepared = {self.flow.records[each] for each in self.flow.prepared if isinstance(each, cst.Call)}
        self.passed = self.flow.passed
        self.called_from: dict[Function, list[Call]] = {}
        self._targets: dict[Call, list[Function]] = {}
        for node, calls in self.flow.calls.items():
            function = self.flow.own_functions[node]
            for call in (self.flow.records[each] for each in calls):
                if function.name != "forward" or call.last == "forward":  # `model(x)` isn't one
                    self.called_from.setdefault(function, []).append(call)
                    self._targets.setdefault(call, []).append(function)

    # --- what names stand for ---

    def values(self, node: cst.CSTNode | None, frame: Frame) -> Values:
        """What an expression may stand for, in the kinds that rules use.

        Kinds are those of `Value`, with these differences. An "iterator" is a "loader", a "writer" a "tracker", and
        "items" are a "tuple" or "dict". An "object" is a "model", a "stream", a "dataset", a "sampler", an "own
        sampler" or an "own loader" by the base of its class, or else an "instance".
        """
        if node is None or (isinstance(node, cst.Name) and node.value == "self"):
            return NOTHING
        self.flow.adopt(node, frame)
        return self._as_seen(self.flow.of(node))

    def parts(self, values: Values) -> Values:
        """Values, and the values in the tuples and dictionaries among them, however deep."""
        found = [*values]
        for each in found:  # the list grows
            inside = NOTHING.union(*self._items(each)) if each.kind in ("tuple", "dict") else NOTHING
            found += inside.difference(found)
        return frozenset(found)

    def makers(self, values: Iterable[Value], *kinds: str) -> list[Call]:
        """The calls that make values; with `kinds`, only values of these kinds."""
        sites = {each.site: None for each in values if not kinds or each.kind in kinds}
        return [self.flow.records[each] for each in sites if isinstance(each, cst.Call)]

    def kinds(self, node: cst.CSTNode | None, frame: Frame) -> set[str]:
        """The kinds of the values that an expression may stand for."""
        return {each.kind for each in self.values(node, frame)}

    def kinds_made(self, call: Call) -> set[str]:
        """The kinds of the values that a call may return."""
        return self.kinds(call.node, call.frame)

    def receiver_kinds(self, call: Call) -> set[str]:
        """The kinds of the object whose method is called."""
        return self.kinds(call.receiver, call.frame)

    def record(self, node: cst.Call) -> Call | None:
        """The record of a call node, or None."""
        return self.flow.records.get(node)

    def functions_of(self, call: Call) -> list[Function]:
        """The script's own functions and methods that a call may run."""
        return self._targets.get(call, [])

    def _as_seen(self, values: Values) -> Values:
        every = values.union(*(each.inner for each in values if each.kind == "passed"))
        found = frozenset(seen for each in every if (seen := self._as_one_seen(each)) is not None)
        is_unsure = found and any(each.kind == "object" and self._as_one_seen(each) is None for each in every)
        return found | {Value("unknown")} if is_unsure else found

    @_once(None)  # a list may hold itself
    def _as_one_seen(self, value: Value) -> Value | None:
        kind = self._kind(value)
        if not kind or (value.kind == "items" and not any(self._items(value))):
            return None
        return replace(value, kind=kind, inner=self._as_seen(value.inner))

    def _items(self, value: Value) -> list[Values]:
        return list(map(self._as_seen, self.flow.parts(value)))

    def _kind(self, value: Value) -> str:
        if value.kind == "object":
            return self.flow.kind_of_object(value)
        if value.kind == "items" and isinstance(value.site, cst.Dict | cst.DictComp):
            return "dict"
        return "" if value.kind in _UNSEEN else _SEEN_AS.get(value.kind, value.kind)

    # --- what kind of script ---

    @functools.cached_property
    def texts(self) -> list[str]:
        """The strings of the code as they are written; docstrings say what a script means, and not what it does."""
        nodes = [(file, node) for file in self.files for node in file.nodes if isinstance(node, cst.BaseString)]
        return [text_of(node) for file, node in nodes if not isinstance(file.parent(node), cst.Expr)]

    def uses(self, *names: str) -> bool:
        """Whether the code has one of these names or attributes."""
        return any(not file.used.isdisjoint(names) for file in self.files)

    def named(self, *names: str) -> list[Call]:
        """The calls of these full names; a name that begins with a dot matches the last part only."""
        full, last = {each for each in names if each[0] != "."}, {each[1:] for each in names if each[0] == "."}
        return [call for call in self.calls if call.name in full or call.last in last]

    def imports(self, package: str) -> bool:
        """Whether a file of the script imports a package or something of it."""
        return any(each.partition(".")[0] == package for file in self.files for each in file.imports.values())

    @functools.cached_property
    def starts_ranks(self) -> bool:
        """Whether the script itself starts processes that run a function, for example by `spawn`."""
        return bool(self.named(".spawn", ".Process", ".launch", ".notebook_launcher"))

    @functools.cached_property
    def uses_accelerate(self) -> bool:
        """Whether the script makes an Accelerator."""
        return bool(self.named("accelerate.Accelerator"))

    @functools.cached_property
    def uses_fabric(self) -> bool:
        """Whether the script makes a Fabric."""
        return any("fabric" in self.kinds_made(call) for call in self.named(".Fabric"))

    @functools.cached_property
    def uses_evenstep(self) -> bool:
        """Whether the script calls `evenstep.init` or wraps a model in evenstep's DistributedDataParallel."""
        return bool(self.named("evenstep.init", "evenstep.DistributedDataParallel"))

    @functools.cached_property
    def uses_torch_distributed(self) -> bool:
        """Whether the script makes a process group or wraps a model with torch's own classes."""
        names = ("torch.nn.parallel.DistributedDataParallel", "torch.distributed.fsdp.FullyShardedDataParallel")
        return bool(self.named("torch.distributed.init_process_group", *names, "torch.distributed.fsdp.fully_shard"))

    @functools.cached_property
    def is_distributed(self) -> bool:
        """Whether several ranks run the script."""
        return self.uses_torch_distributed or self.uses_accelerate or self.uses_fabric or self.uses_evenstep

    @functools.cached_property
    def communicates(self) -> bool:
        """Whether the script names anything that communicates between ranks, even if no rule knows it."""
        names = {each for file in self.files for each in file.imports.values()} | {call.name for call in self.calls}
        return any(name.partition(".")[0] in _LIBRARIES or name.startswith(_OF_TORCH) for name in names)

    @functools.cached_property
    def uses_gpus(self) -> bool:
        """Whether tensors may lie on a GPU."""
        if self.uses_accelerate or self.uses_fabric:
            makers = self.named("accelerate.Accelerator", ".Fabric")
            chosen = [text_of(call.argument(each)) for call in makers for each in ("cpu", "accelerator")]
            return not any(each in ("True", "'cpu'", '"cpu"') for each in chosen)
        if any(call.last == "cuda" and call.receiver is not None for call in self.calls):
            return True
        names = ("torch.cuda.set_device", "torch.cuda.device", "torch.cuda.current_device")
        return bool(self.named(*names)) or any(re.match(r"""\w?["']cuda[:"']""", each) for each in self.texts)

    # --- whether it runs at all ---

    def is_reached(self, frame: Frame) -> bool:
        """Whether the script may run the code in a frame, as far as calls can be followed.

        All code in the script's own file counts as reached. In an imported module, the `__main__` block isn't reached,
        nor is a function that no reached code calls. `forward` and methods such as `__len__`, which torch and python
        call, are reached if `__init__` is.
        """
        if frame.file is self.files[0]:
            return True
        if any(each.kind == "if" and "__name__" in text_of(each.test) for each in frame.outwards()):
            return False
        function = frame.function
        if function is None or function in self.passed:
            return True
        if function.cls is not None and (function.name.startswith("__") or function.name == "forward"):
            maker = function.cls.methods.get("__init__")
            if maker is not function:
                return maker is None or self.is_reached(Frame("function", None, frame.file, maker))
        return self._function_is_reached(function)

    @_once(False)  # a function doesn't reach itself
    def _function_is_reached(self, function: Function) -> bool:
        if any(self.is_reached(each.frame) for each in self.called_from.get(function, [])):
            return True
        return function.is_nested and self.is_reached(function.frame)

    @functools.cached_property
    def unreached_lines(self) -> frozenset[tuple[File, int]]:
        """The lines with calls or loops, none of which is reached."""
        frames = [(each.frame, each.line) for each in self.calls] + [(each.frame, each.line) for each in self.loops]
        lines = {(frame.file, line) for frame, line in frames if not self.is_reached(frame)}
        return frozenset(lines - {(frame.file, line) for frame, line in frames if self.is_reached(frame)})

    # --- on which ranks ---

    def some_ranks_only(self, frame: Frame) -> bool:
        """Whether the code in a frame certainly runs on some ranks only, if there are several."""
        return self._is_partial(frame, surely=True)

    def perhaps_some_ranks_only(self, frame: Frame) -> bool:
        """Whether the code in a frame may run on some ranks only: a condition around it seems to depend on the rank."""
        return self._is_partial(frame, surely=False)

    def condition_of(self, frame: Frame) -> Frame | None:
        """The innermost `if` branch around a frame that runs on some ranks only."""
        return next((each for each in frame.outwards() if each.kind == "if" and self._splits(each)), None)

    def _splits(self, frame: Frame) -> bool:
        """Whether a branch of an `if` certainly runs on some ranks only."""
        return self._on_some(frame.test, frame, frame.holds)

    def _on_some(self, test: cst.CSTNode | None, frame: Frame, holds: bool) -> bool:
        """Whether `test` has the truth value `holds` on some ranks only, never on all."""
        match test:
            case cst.UnaryOperation() if isinstance(test.operator, cst.Not) and not self.kinds(
                test.expression, frame
            ) & {"rank", "local rank"}:
                return self._on_some(test.expression, frame, not holds)
            case cst.BooleanOperation():
                both = [self._on_some(each, frame, holds) for each in (test.left, test.right)]
                if isinstance(test.operator, cst.And) == holds:
                    return any(both)
                # `not distributed or rank == 0`: with several ranks the first is false.
                alone = [bool(_SINGLE.search(text_of(each))) for each in (test.left, test.right)]
                return all(is_partial or one for is_partial, one in zip(both, alone, strict=True)) and any(both)
        kinds = self.kinds(test, frame)
        if kinds & {"main", "others"}:
            return True
        # `if rank:` and `if not rank:`
        return bool(kinds and kinds <= {"rank", "local rank"}) and isinstance(
            test, cst.Name | cst.Attribute | cst.UnaryOperation
        )

    def _is_partial(self, frame: Frame, *, surely: bool) -> bool:
        for each in frame.outwards():
            if each.kind == "if" and (self._splits(each) or (not surely and _RANKISH.search(text_of(each.test)))):
                return True
        function = frame.function
        return function is not None and self._function_is_partial(function, surely)

    @_once(False)  # a recursive call decides nothing
    def _function_is_partial(self, function: Function, surely: bool) -> bool:
        if any(each.rpartition(".")[2] in _RANK_ZERO_DECORATORS for each in function.decorators):
            return True
        if function in self.passed:
            return False
        sites = [each for each in self.called_from.get(function, []) if self.is_reached(each.frame)]
        if sites and all(self._is_partial(each.frame, surely=surely) for each in sites):
            return True
        return function.is_nested and self._is_partial(function.frame, surely=surely)

    # --- in which loops ---

    @_once(None)
    def loops_around(self, frame: Frame) -> list[Loop]:
        """The loops around a frame, innermost first, then the loops around the calls of its function."""
        found, functions, pending = dict[Loop, None](), set[Function](), [frame]
        for each in pending:  # the list grows
            found |= {self._loop_of[around]: None for around in each.outwards() if around in self._loop_of}
            if each.function is not None and each.function not in functions:
                functions.add(each.function)
                pending += [site.frame for site in self.called_from.get(each.function, ())]
        return list(found)

    def conditions_until(self, frame: Frame, loop: Loop) -> list[Frame] | None:
        """The conditions between a frame and a loop around it, on the call path with the fewest; None if no path."""
        ifs: list[Frame] = []
        for each in frame.outwards():
            if each is loop.frame:
                return ifs
            if each.kind in ("if", "except", "lambda"):
                ifs.append(each)
        way = self._way_to(frame.function, loop) if frame.function is not None else None
        return None if way is None else ifs + way

    @_once(None)  # a recursive call is no path
    def _way_to(self, function: Function, loop: Loop) -> list[Frame] | None:
        ways = [self.conditions_until(site.frame, loop) for site in self.called_from.get(function, [])]
        return min((way for way in ways if way is not None), key=len, default=None)

    @functools.cached_property
    def step_calls(self) -> list[Call]:
        """The calls that make an optimizer step, also through a gradient scaler."""
        found = []
        for call in self.calls:
            if call.last != "step" or call.receiver is None:
                continue
            kinds = self.receiver_kinds(call)
            if (
                "optimizer" in kinds
                or ("scaler" in kinds and call.node.args)
                or (not kinds and OPTIMIZER_NAME.fullmatch(dotted(call.receiver)))
                or (not kinds and "scaler" in dotted(call.receiver) and call.node.args)
            ):
                found.append(call)
        return found

    @functools.cached_property
    def backward_calls(self) -> list[Call]:
        """The calls that run a backward pass."""
        return [
            call
            for call in self.calls
            if call.last == "backward" and call.receiver is not None and not call.name.startswith("torch.autograd")
        ]

    @functools.cached_property
    def step_loops(self) -> list[Loop]:
        """The innermost loops around optimizer steps: one iteration is a step or a micro-batch."""
        around = [self.loops_around(call.frame) for call in self.step_calls]
        innermost = [[loop for loop in loops if not self._is_over_objects(loop)][:1] for loops in around]
        return list(dict.fromkeys(loop for loops in innermost for loop in loops))

    def _is_over_objects(self, loop: Loop) -> bool:
        """Whether a loop goes through optimizers, schedulers or parameters, as `for optimizer in optimizers` does."""
        text = text_of(loop.iterates)
        if self.kinds(loop.iterates, loop.frame) & {"tuple", "dict"}:
            return True
        return "optimizers" in text or "schedulers" in text or "parameters" in text

    @functools.cached_property
    def training_loops(self) -> list[Loop]:
        """The loops around optimizer steps and around backward passes."""
        calls = [*self.step_calls, *self.backward_calls]
        return list(dict.fromkeys(loop for call in calls for loop in self.loops_around(call.frame)))

    def loaders_of(self, loop: Loop) -> Values:
        """The loaders that a loop reads: those that it iterates over, and those in its calls of `next`."""
        found = set(self._iterated(loop.iterates, loop.frame))
        for call in self.calls:
            if call.last == "next" and call.node.args and loop in self.loops_around(call.frame)[:1]:
                found |= {each for each in self.values(call.node.args[0].value, call.frame) if each.kind == "loader"}
        return frozenset(found)

    def _iterated(self, node: cst.CSTNode | None, frame: Frame) -> Values:
        """The loaders behind an iterated expression, also those inside `zip(...)` and similar calls.

        A call such as `log.every(loader)` counts as the loader passed here. The values that the function yields come
        from all its callers.
        """
        arguments = [each.value for each in node.args] if isinstance(node, cst.Call) else []
        given = NOTHING.union(*(self._iterated(each, frame) for each in arguments))
        return given or frozenset(each for each in self.values(node, frame) if each.kind in ("loader", "own loader"))

    @functools.cached_property
    def training_loaders(self) -> Values:
        """The loaders whose batches the script trains on."""
        return frozenset(each for loop in self.training_loops for each in self.loaders_of(loop))

    @functools.cached_property
    def evaluation_loops(self) -> list[Loop]:
        """The loops over a loader without a training step or backward pass. Loops of generators don't count."""
        return [
            loop
            for loop in self.loops
            if loop not in self.training_loops
            and loop.iterates is not None
            and not (loop.frame.function is not None and loop.frame.function.yields)
            and (self.loaders_of(loop) or _LOADER_NAME.fullmatch(_iterated_name(loop.iterates)))
        ]

    @functools.cached_property
    def looked(self) -> Looked:
        """What doctor examined in the script, and the code that it didn't understand."""
        made = [(call, kind) for call in self.calls for kind in self._kinds_itself(call)]
        loaders, wrapped = ({id(call) for call, each in made if each == kind} for kind in ("loader", "wrapped"))
        starred = [
            (f"{each.star}{text_of(each.value)}", call)
            for call, kind in made
            if kind in ("loader", "wrapped", "sampler")
            for each in call.node.args
            if each.star
        ]
        lines = [(text, call.frame.file.source.place(call.line)[0]) for text, call in starred]
        for loop in self.step_loops if self.is_distributed else ():
            if loop.iterates is not None and not self.loaders_of(loop) and not self._counts_rounds(loop):
                lines.append((shortened(text_of(loop.iterates), 60), loop.frame.file.source.place(loop.line)[0]))
        unknown = tuple(dict.fromkeys(lines))[:_MOST_UNKNOWN]
        return Looked(self.is_distributed, self.communicates, len(loaders), len(wrapped), unknown)

    @functools.cached_property
    def facts(self) -> Facts:
        """Facts of the source by which a run of the script is judged."""
        guarded = {
            (str(call.frame.file.source.path.absolute()), call.line)
            for call in self.calls
            if self.perhaps_some_ranks_only(call.frame)
        }
        return Facts(guarded, self.uses_gpus, self.uses("SyncBatchNorm", "convert_sync_batchnorm"))

    def _kinds_itself(self, call: Call) -> set[str]:
        """The kinds of the values that the call itself makes, alone or in a tuple."""
        made = self.parts(self.values(call.node, call.frame))
        return {each.kind for each in made if each.site is call.node}

    def _counts_rounds(self, loop: Loop) -> bool:
        return isinstance(loop.iterates, cst.Call) and dotted(loop.iterates.func) in ("range", "trange", "count")


def _iterated_name(node: cst.CSTNode | None) -> str:
    """The name inside nested calls: "loader" for `enumerate(tqdm(loader))`."""
    while isinstance(node, cst.Call):
        if not node.args:
            return ""
        node = node.args[0].value
    return dotted(node)
