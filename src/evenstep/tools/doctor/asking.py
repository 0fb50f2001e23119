"""Questions that rules ask about a script's source, and mends with the script's own names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence

import libcst as cst

from evenstep.tools.doctor.rule import Edit, Found, found
from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.tree import (
    Assignment,
    Call,
    Class,
    File,
    Frame,
    Function,
    Loop,
    dotted,
    leaves,
    shortened,
    text_of,
)
from evenstep.tools.reading.values import WRAPPERS, Value

# Re-exported, so that rules import everything for `read` from here.
__all__ = [
    "Assignment",
    "Call",
    "Class",
    "Edit",
    "File",
    "Found",
    "Frame",
    "Function",
    "Loop",
    "Script",
    "Value",
    "dotted",
    "found",
    "leaves",
    "shortened",
    "text_of",
]

_RANK_WORDS = re.compile(r"(?i)rank|world|num_replicas|process_index|num_processes|shard|is_main|split_dataset_by_node")
WORLD = re.compile(r"(?i)world_size|num_replicas|num_processes|n_?gpus|num_gpus|get_world_size|device_count|ngpus")
RANK_IN_ARGUMENTS = re.compile(
    r"(?i)rank|is_?main|is_?master|master|process_index|\bgpu\b|gpu_id|primary|chief|node_id"
)


def walk(node: cst.CSTNode | None) -> Iterator[cst.CSTNode]:
    """A node and all nodes within it."""
    if node is None:
        return
    pending = [node]
    while pending:
        each = pending.pop()
        yield each
        pending += each.children


def names_in(node: cst.CSTNode | None) -> set[str]:
    """The dotted names in an expression, each with its prefixes: `a.b` gives `a.b` and `a`."""
    names: set[str] = set()
    pending = [] if node is None else [node]
    while pending:
        each = pending.pop()
        name = dotted(each)
        if name and isinstance(each, cst.Name | cst.Attribute):
            while name and name != "self":
                names.add(name)
                name = name.rpartition(".")[0]
            continue
        if isinstance(each, cst.Arg):
            pending.append(each.value)
            continue
        pending += each.children
    return names


def assignments_to(script: Script, name: str, frame: Frame) -> list[Assignment]:
    """The assignments to a name in its function; else in its class, for `self.x`; else at the top level of the file."""
    of_name = frame.file.assigned.get(name, [])
    inside = [each for each in of_name if each.frame.function is frame.function]
    if inside or frame.function is None:
        return inside
    if name.startswith("self.") and frame.function.cls is not None:
        return [
            each
            for each in of_name
            if each.frame.function is not None and each.frame.function.cls is frame.function.cls
        ]
    if name.partition(".")[0] in frame.function.parameters and "." not in name:
        return []
    return [each for each in of_name if each.frame.function is None]


def origins(
    script: Script, node: cst.CSTNode | None, frame: Frame, depth: int = 4
) -> Iterator[tuple[cst.CSTNode, Frame]]:
    """An expression, and the expressions that the names in it were assigned, followed through the script.

    Also those that calls pass for its parameters, and those that called functions of the script return.
    """
    pending = [(node, frame, depth)] if node is not None else []
    seen: set[int] = set()
    while pending:
        each, where, left = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each, where
        if left == 0:
            continue
        for name in names_in(each):
            for assignment in assignments_to(script, name, where):
                pending.append((assignment.value, assignment.frame, left - 1))
            function = where.function
            if function is not None and name in function.parameters:
                for site in script.called_from.get(function, []):
                    value = argument_for(site, function, name)
                    if value is not None:
                        pending.append((value, site.frame, left - 1))
        for inner in walk(each):
            if isinstance(inner, cst.Call):
                call = script.record(inner)
                for target in script.functions_of(call) if call else []:
                    for value in target.returns:
                        pending.append((value, Frame("function", None, target.file, target), left - 1))


def argument_for(call: Call, function: Function, parameter: str) -> cst.CSTNode | None:
    """The argument that a call passes for a parameter; None if it passes none."""
    index = function.parameters.index(parameter)
    if function.cls is not None and "staticmethod" not in function.decorators:
        index -= 1
    return call.argument(parameter, index if index >= 0 else None)


def behind(
    script: Script, node: cst.CSTNode | None, frame: Frame, pattern: str | re.Pattern[str], depth: int = 4
) -> str:
    """The first text that a pattern matches, of an expression and its `origins`; "" if none matches."""
    texts = (text_of(each) for each, _ in origins(script, node, frame, depth))
    return next((text for text in texts if re.search(pattern, text)), "")


def words_of(node: cst.CSTNode) -> str:
    """The names and strings in a piece of code, joined, without comments and docstrings."""
    words, pending = list[str](), [node]
    while pending:
        each = pending.pop()
        if isinstance(each, cst.Name | cst.SimpleString):
            words.append(str(each.value))
        elif not (isinstance(each, cst.Expr) and isinstance(each.value, cst.SimpleString)):
            pending += each.children
    return " ".join(words)


def depends_on_ranks(script: Script, node: cst.CSTNode | None, frame: Frame) -> bool:
    """Whether an expression, one of its `origins` or a class that it makes names ranks, a world size or shards."""
    for each, where in origins(script, node, frame):
        values = script.values(each, where)
        classes = [one.definition for one in values if one.definition is not None]
        nodes = [each, *classes, *(call.node for call in script.makers(values))]
        if any(_RANK_WORDS.search(words_of(one)) for one in nodes):
            return True
    return False


_DIVIDERS = ("chunk", "tensor_split", "array_split", "split")
_SELECTORS = (*_DIVIDERS, "islice", "range", "arange", "Subset", "skip")
_SHARDERS = ("shard", "scatter", "scatter_object_list", "split_dataset_by_node", "split_between_processes")


def is_of_rank(script: Script, node: cst.CSTNode | None, frame: Frame, *others: str) -> bool:
    """Whether a rank, or a value of the kinds `others`, goes into an expression or one of its `origins`."""
    return any(
        script.kinds(inner, where) & {"rank", "local rank", *others}
        for each, where in origins(script, node, frame, depth=3)
        for inner in walk(each)
        if isinstance(inner, cst.Name | cst.Attribute | cst.Call | cst.Subscript)
    )


def divides_by_hand(script: Script) -> bool:
    """Whether the script itself divides data among ranks, by a slice, remainder or range that uses the rank."""
    slices = [(node, frame) for file in script.files for node, frame in file.slices if script.is_reached(frame)]
    for call in script.calls:
        if call.last in _SHARDERS:
            return True
        others = ("world size",) if call.last in _DIVIDERS else ()
        if call.last in _SELECTORS and any(is_of_rank(script, each, call.frame, *others) for each in call.arguments):
            return True
    return any(is_of_rank(script, node, frame) for node, frame in slices)


def is_true(node: cst.CSTNode | None) -> bool:
    """Whether an argument is the literal True."""
    return text_of(node) == "True"


def is_nothing(node: cst.CSTNode | None) -> bool:
    """Whether an argument isn't passed, or is None."""
    return node is None or text_of(node) == "None"


def on_ranks(script: Script, call: Call) -> bool:
    """Whether a call may run on a rank, and not only in a process that starts the ranks."""
    starts = script.starts_ranks and script.passed
    return not starts or _is_passed(script, call.frame.function, frozenset())


def _is_passed(script: Script, function: Function | None, seen: frozenset[Function]) -> bool:
    """Whether a function, or one that calls it, is passed as an argument, for example to start ranks."""
    if function is None or function in seen:
        return False
    callers = [site.frame.function for site in script.called_from.get(function, [])]
    is_passed = not script.passed.isdisjoint({function, function.frame.function} - {None})
    return is_passed or any(_is_passed(script, each, seen | {function}) for each in callers)


def on_all_ranks(script: Script, call: Call) -> bool:
    """Whether a call seems to run on every rank: no condition around it may depend on the rank."""
    if script.perhaps_some_ranks_only(call.frame) or not on_ranks(script, call):
        return False
    for frame in call.frame.outwards():
        if frame.kind == "except":
            return False
        if frame.kind == "with" and re.search(r"_first|rank_zero|main_process", heading(frame)):
            return False
    return True


def heading(frame: Frame) -> str:
    """The text of the context managers of a `with`; "" for other frames."""
    return ", ".join(text_of(item.item) for item in frame.node.items) if isinstance(frame.node, cst.With) else ""


def has_argument_of_rank(script: Script, call: Call) -> bool:
    """Whether an argument uses the rank, so that ranks call differently or name themselves."""
    if any(RANK_IN_ARGUMENTS.search(text_of(each)) for each in call.node.args):
        return True
    given = [
        assignment.value
        for each in call.arguments
        for name in names_in(each)
        for assignment in assignments_to(script, name, call.frame)
    ]
    prefixes = [
        each for each in given if isinstance(each, cst.FormattedString | cst.ConcatenatedString | cst.BinaryOperation)
    ]
    return any(RANK_IN_ARGUMENTS.search(text_of(each)) for each in prefixes) or any(
        script.kinds(inner, call.frame) & {"rank", "local rank"}
        for each in call.arguments
        for inner in walk(each)
        if isinstance(inner, cst.Name | cst.Attribute)
    )


def in_training_or_evaluation(script: Script, call: Call) -> bool:
    """Whether a call is in a training or evaluation loop, or in a function with a step loop or evaluation loop."""
    around = [loop for loop in script.loops_around(call.frame) if not isinstance(loop.node, cst.CompFor)]
    if any(loop in script.training_loops or loop in script.evaluation_loops for loop in around):
        return True
    function = call.frame.function
    return function is not None and any(
        loop.frame.function is function for loop in [*script.evaluation_loops, *script.step_loops]
    )


def runs(script: Script, calls: Sequence[Call], is_wanted: Callable[[Call], bool], depth: int = 3) -> bool:
    """Whether a wanted call is among `calls`, or in the script's own functions that they may run.

    A method of an unknown object may be any method of that name.
    """
    if any(map(is_wanted, calls)):
        return True
    targets = {target for call in calls for target in script.functions_of(call)}
    unknown = {call.last for call in calls if call.receiver is not None and not script.functions_of(call)}
    targets |= {each for file in script.files for each in file.all_functions if each.cls and each.name in unknown}
    inside = [call for call in script.calls if call.frame.function in targets]
    return depth > 0 and bool(inside) and runs(script, inside, is_wanted, depth - 1)


def exclude_each_other(one: Frame, other: Frame) -> bool:
    """Whether two frames never both run: they are in opposite branches of one `if`, or of two with the same test."""
    tests = [dict(map(_plain_test, (each for each in frame.outwards() if each.kind == "if"))) for frame in (one, other)]
    return any(tests[1].get(text, holds) != holds for text, holds in tests[0].items())


def _plain_test(frame: Frame) -> tuple[str, bool]:
    """The text of a condition without its negation, and whether that text holds in the frame."""
    text = text_of(frame.test)
    plain = re.sub(r"\bis not None\b", "is None", re.sub(r"^not ", "", text))
    return plain, frame.holds ^ (plain != text)


def per_step(script: Script, call: Call) -> bool:
    """Whether a call runs in every iteration of a step loop."""
    return any(script.conditions_until(call.frame, loop) == [] for loop in script.step_loops)


def wrappers_at(script: Script, node: cst.CSTNode | None, frame: Frame, line: int, depth: int = 3) -> list[Value]:
    """The wrappers that an expression certainly stands for at a line; [] if it may be the model itself.

    With `model = DDP(model)` the name stands for both, and the line decides for which.
    """
    values = script.values(node, frame)
    wrapped = [each for each in values if each.kind in WRAPPERS]
    if not wrapped or not any(each.kind in ("model", "instance", "unknown") for each in values):
        return wrapped
    name = dotted(node)
    if not name or not isinstance(node, cst.Name | cst.Attribute):
        return []
    for assignment in assignments_to(script, name, frame):
        made = script.parts(script.values(assignment.value, assignment.frame))
        is_wrapping = isinstance(assignment.value, cst.Call) and any(each.kind in WRAPPERS for each in made)
        if is_wrapping and (assignment.line < line or assignment.frame.function is not frame.function):
            return wrapped
    function = frame.function
    if depth and function is not None and name in function.parameters:
        sites = script.called_from.get(function, [])
        given = [(argument_for(site, function, name), site) for site in sites]
        if given and all(wrappers_at(script, each, site.frame, site.line, depth - 1) for each, site in given):
            return wrapped
    return []


def has_wrapped(script: Script) -> bool:
    """Whether the script makes a data-parallel wrapper."""
    return any("wrapped" in script.kinds_made(call) for call in script.calls if call.name)


# ---------------------------------------------------------------------- loaders


def training_loaders(script: Script) -> list[Call]:
    """The calls that make the training loaders, without evenstep's own loaders."""
    made = {*script.makers(script.training_loaders, "loader")}
    return [call for call in script.calls if call in made and not call.name.startswith("evenstep.")]


def sampler_of(loader: Call) -> cst.CSTNode | None:
    """The sampler or batch sampler that is passed to a loader; None if there is none."""
    given = [loader.argument("sampler", 3), loader.argument("batch_sampler", 4)]
    return next((each for each in given if not is_nothing(each)), None)


def samplers(script: Script, loader: Call) -> list[Call]:
    """The calls that make the distributed samplers that may be passed to a loader."""
    return script.makers(script.values(sampler_of(loader), loader.frame), "sampler")


def streams(script: Script, loader: Call) -> list[str]:
    """The names of the streams that a loader reads: classes of the script, or a data set with `streaming=True`."""
    dataset = loader.argument("dataset", 0)
    values = script.values(dataset, loader.frame)
    own = [each.definition.name.value for each in values if each.kind == "stream" and each.definition is not None]
    hub = [
        text_of(dataset)
        for each, where in origins(script, dataset, loader.frame)
        for call in script.makers(script.values(each, where), "dataset")
        if is_true(call.argument("streaming"))
    ]
    return own + hub[:1]


# ---------------------------------------------------------------------- output

BARS = re.compile(r"tqdm(?:\.\w+)*\.(?:tqdm|trange|tqdm_notebook)|rich\.progress\.track")
_SAVERS = ("torch.save", "safetensors.torch.save_file", "safetensors.torch.save_model", ".save_pretrained")
_OF_A_RANK = r"(?i)rank|process_index|\bgpu\b|worker|lock|getpid|uuid|devnull|proc_id|BytesIO"
_OF_A_RANK += r"|mkd?s?temp\(|TemporaryDirectory\(|TemporaryFile\("  # names that the system makes up


def saves(script: Script) -> list[Call]:
    """The calls that save a checkpoint."""
    functions = [(call, call.frame.function) for call in script.named(*_SAVERS)]
    return [call for call, function in functions if function is None or function.name != "state_dict"]


def with_what(script: Script, saves: list[Call]) -> Iterator[Call]:
    """The calls whose arguments are saved: for `torch.save(*args)` in a helper function, the calls of the helper."""
    for save in saves:
        function = save.frame.function
        if function is not None and any(each.star == "*" for each in save.node.args):
            yield from script.called_from.get(function, [])
        else:
            yield save


def is_of_a_rank(script: Script, path: cst.CSTNode | None, call: Call) -> bool:
    """Whether a path differs between ranks, or is a file that only this process has.

    It counts as such if "rank", "gpu", "worker" or the like is in a name or string that the path is made of.
    """
    return bool(behind(script, path, call.frame, _OF_A_RANK))


# ---------------------------------------------------------------------- collectives

_OF_TORCH = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "new_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
}
_METHODS = {
    "accelerator": {
        "gather",
        "gather_for_metrics",
        "pad_across_processes",
        "reduce",
        "save_state",
        "wait_for_everyone",
    },
    "fabric": {"all_gather", "all_reduce", "barrier", "broadcast", "save"},
    "world": {"barrier", "broadcast_object", "exchange", "gather", "mean"},
}
BARRIERS = {"barrier", "monitored_barrier", "wait_for_everyone"}


def collectives(script: Script) -> list[Call]:
    """The collective calls of the script, without those of sub-groups."""
    return [call for call in script.calls if _is_collective(script, call)]


def _is_collective(script: Script, call: Call) -> bool:
    if call.name.startswith("torch.distributed."):
        return call.last in _OF_TORCH and not _has_group(call)
    return any(call.last in _METHODS.get(kind, ()) for kind in script.receiver_kinds(call))


def _has_group(call: Call) -> bool:
    """Whether a call may be passed a sub-group: perhaps only that group's ranks reach the call."""
    given = call.argument("group", 0 if call.last in BARRIERS else None)
    return not is_nothing(given) or any("group" in text_of(call.positional(index)) for index in range(2, 5))


def is_called_elsewhere(script: Script, call: Call, alike: list[Call]) -> bool:
    """Whether one of `alike` is in the same function under another condition, or in the other branch of its `if`."""
    places = {_condition(script, each) for each in alike if each.frame.function is call.frame.function}
    return len(places) > 1


def _condition(script: Script, call: Call) -> tuple[str, bool]:
    frame = script.condition_of(call.frame) or next((each for each in call.frame.outwards() if each.kind == "if"), None)
    return ("", True) if frame is None else (text_of(frame.test), frame.holds)


def where(script: Script, call: Call) -> str:
    """A text that says on which ranks a call runs."""
    frame: Frame | None = script.condition_of(call.frame)
    if frame is None:
        function = call.frame.function
        return f"in {function.name}, which some ranks call only" if function else "on some ranks only"
    condition = shortened(text_of(frame.test), 60)
    return f"where `{condition}` {'holds' if frame.holds else 'does not hold'}, on some ranks only"


# ---------------------------------------------------------------------- the step


def is_scaling(node: cst.CSTNode | None) -> bool:
    """Whether an expression is a call such as `scaler.scale(loss)`."""
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "scale"


# ---------------------------------------------------------------------- mends, in the script's own words

_HARMLESS = {"item", "len", "format", "round", "str", "float", "int", "sum", "mean", "max", "min", "time", "keys"}
_HARMLESS |= {"perf_counter", "strftime", "get_last_lr", "join", "state_dict", "numel", "size", "abs", "sqrt", "now"}
_SHARDS = ("FullyShardedDataParallel", "fully_shard", "ZeroRedundancyOptimizer", "DTensor", "parallelize_module")


@functools.cache
def _expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)  # cached, because `Flow` stores values by a node's identity


def own_name(script: Script, kind: str, at: Call) -> str:
    """A name of the script that certainly has a value of this kind at a call; "" if there is none."""
    function = at.frame.function
    known = [*(function.parameters if function is not None else ())]
    for name, assignments in at.frame.file.assigned.items():
        visible = assignments_to(script, name, at.frame) if name else []
        if any(each.frame.function is not function or each.line < at.line for each in visible) and assignments:
            known.append(name)
    return next((name for name in known if script.kinds(_expression(name), at.frame) == {kind}), "")


def local_rank(script: Script, at: Call) -> str:
    """Code for the local rank at a call, with the script's own name if it has one."""
    return own_name(script, "local rank", at) or 'int(os.environ["LOCAL_RANK"])'


def distributed(file: File) -> str:
    """The name of `torch.distributed` in a file."""
    return next((local for local, whole in file.imports.items() if whole == "torch.distributed"), "torch.distributed")


def target_of(call: Call) -> str:
    """The name that the result of a call is assigned to; "" if there is none."""
    return next((dotted(each.target) for each in call.frame.file.assignments if each.value is call.node), "")


def on_main(script: Script, at: Call) -> str:
    """Code for a condition that holds on one rank at a call, with the script's own names; "" if it has none."""
    for kind, condition in (
        ("accelerator", "{}.is_main_process"),
        ("fabric", "{}.is_global_zero"),
        ("world", "{}.is_main"),
        ("main", "{}"),
        ("rank", "{} == 0"),
    ):
        name = own_name(script, kind, at)
        if name:
            return condition.format(name)
    name = distributed(at.frame.file)
    is_known = name in at.frame.file.imports and not (script.uses_accelerate or script.uses_fabric)
    return f"{name}.get_rank() == 0" if is_known else ""


def statement_of(call: Call) -> list[str]:
    """The lines of a call that is a whole statement; [] if the lines hold more than the call."""
    text = text_of(call.node)  # the indentation of its further lines may differ from the file's
    lines = call.frame.file.source.text.split("\n")[call.line - 1 : call.line + text.count("\n")]
    plain, whole = "".join(text.split()), "".join("".join(lines).split())
    rest = whole.removeprefix(plain)
    return lines if whole.startswith(plain) and (not rest or rest[0] == "#") and '"""' not in text else []


def guarded(script: Script, call: Call) -> tuple[str, tuple[Edit, ...]]:
    """(mend, edits) that put a call under a condition that holds on one rank.

    There are edits only if no argument may need another rank.
    """
    condition, lines = on_main(script, call), statement_of(call)
    mend = f"if {condition or f'{distributed(call.frame.file)}.get_rank() == 0'}:\n    {text_of(call.node)}"
    inner = [each for argument in call.arguments for each in walk(argument) if isinstance(each, cst.Call)]
    is_certain = not script.uses_evenstep and not script.uses(*_SHARDS) and not script.uses_fabric
    if not (condition and lines and is_certain and all(last_of(each) in _HARMLESS for each in inner)):
        return mend, ()
    indent = lines[0][: call.column - 1]
    text = "\n".join([f"{indent}if {condition}:", *(f"    {each}" for each in lines)])
    return mend, (Edit(call.line, call.line + len(lines) - 1, text),)


def last_of(call: cst.Call) -> str:
    """The last part of the called name."""
    return str(call.func.attr.value) if isinstance(call.func, cst.Attribute) else dotted(call.func)


def by_library(script: Script, at: Call, *, accelerate: str = "", fabric: str = "") -> str:
    """The mend for the library that the script uses, with the script's name for it; "" for torch's own classes."""
    text = accelerate if script.uses_accelerate else fabric if script.uses_fabric else ""
    kind = "accelerator" if script.uses_accelerate else "fabric"
    return re.sub(rf"\b{kind}\b", own_name(script, kind, at) or kind, text)


_SHARES = re.compile(r"(?i)reduce|gather|sync|broadcast|average")


class OwnResults:
    """Finds what a rank measures on its own part of the validation data.

    Attributes:
        evaluations: The functions that evaluate a model on a rank's own part.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._shared = collectives(script)
        self.evaluations: set[Function] = set()
        if any(map(script.imports, ("torchmetrics", "ignite", "evaluate"))):
            return  # these libraries compute numbers of all ranks
        for loop in script.evaluation_loops:
            function, loaders = loop.frame.function, script.makers(script.loaders_of(loop))
            if function is not None and any(map(self._is_divided, loaders)):
                self.evaluations.add(function)

    def measured(self, node: cst.CSTNode | None, frame: Frame) -> list[Call]:
        """The calls of evaluations whose results go into an expression, unless ranks seem to exchange them."""
        found = [call for call in self._calls(node, frame) if self.evaluations & {*self._script.functions_of(call)}]
        return [] if self.is_shared(node, frame) else found

    def is_shared(self, node: cst.CSTNode | None, frame: Frame) -> bool:
        """Whether ranks seem to have exchanged what goes into an expression, by its names and the calls behind it."""
        names = {name for call in self._shared for argument in call.arguments for name in names_in(argument)}
        if any(names_in(each) & names for each in self._behind(node, frame)):
            return True
        shares = lambda call: call in self._shared or bool(_SHARES.search(call.last))  # noqa: E731
        return runs(self._script, self._calls(node, frame), shares)

    def _behind(self, node: cst.CSTNode | None, frame: Frame) -> Iterator[cst.CSTNode]:
        """An expression, the values assigned to its names, and the conditions around these, recursively."""
        pending: list[tuple[cst.CSTNode | None, Frame, int]] = [(node, frame, 4)]
        seen: set[int] = set()
        while pending:
            each, where, left = pending.pop()
            if each is None or id(each) in seen:
                continue
            seen.add(id(each))
            yield each
            for name in names_in(each) if left else ():
                for given in assignments_to(self._script, name, where):
                    pending.append((given.value, given.frame, left - 1))
                    pending += [
                        (around.test, around, left - 1) for around in given.frame.outwards() if around.kind == "if"
                    ]

    def _calls(self, node: cst.CSTNode | None, frame: Frame) -> list[Call]:
        inside = [inner for each in self._behind(node, frame) for inner in walk(each) if isinstance(inner, cst.Call)]
        return [call for inner in inside if (call := self._script.record(inner)) is not None]

    def _is_divided(self, loader: Call) -> bool:
        sampler = loader.argument("sampler", 3) or loader.argument("batch_sampler", 4)
        return loader in self._script.prepared or "sampler" in self._script.kinds(sampler, loader.frame)


def summed(script: Script, name: str, value: str, module: str) -> str:
    """Statements that make a name a tensor with the sum of the ranks' values.

    Args:
        script: The script.
        name: The name.
        value: The code of a number, or of a tensor with one.
        module: What the script calls `torch.distributed`.
    """
    device = ', device="cuda"' if script.uses_gpus else ""
    return f"{name} = torch.tensor(float({value}){device})\n{module}.all_reduce({name})\n"
