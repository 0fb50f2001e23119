"""What several groups of rules ask a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import libcst as cst

from evenstep.tools.doctor.findings import Finding
from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.program import Assignment, Call, File, Frame, Function, dotted, text_of
from evenstep.tools.reading.values import Thing

_RANK_WORDS = re.compile(r"(?i)rank|world|num_replicas|process_index|num_processes|shard|is_main|split_dataset_by_node")
WORLD = re.compile(r"(?i)world_size|num_replicas|num_processes|n_?gpus|num_gpus|get_world_size|device_count|ngpus")
RANK_IN_ARGUMENTS = re.compile(
    r"(?i)rank|is_?main|is_?master|master|process_index|\bgpu\b|gpu_id|primary|chief|node_id"
)


def found(
    rule: str, at: Call | tuple[File, int], evidence: str, *, cost: str = "", mend: str = "", column: int = 1
) -> Finding:
    """A finding at a call, or at a line of a file."""
    if isinstance(at, Call):
        file, line, column = at.frame.file, at.line, at.column
    else:
        file, line = at
    shown, cell = file.source.place(line)
    return Finding(rule, str(file.source.path), shown, column, evidence, cost, mend, cell=cell)


def walk(node: cst.CSTNode | None) -> Iterator[cst.CSTNode]:
    """A node and all below it."""
    if node is None:
        return
    pending = [node]
    while pending:
        each = pending.pop()
        yield each
        pending += each.children


def names_in(node: cst.CSTNode | None) -> set[str]:
    """The dotted names that an expression reads, each with those that it begins with: `a.b` is `a`, too."""
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
    """The assignments of a name in its function, else in its class, else at the top level of its file."""
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
    """An expression, and those that the names in it were given, also as arguments of the script's own functions."""
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
                for site in script.values.called_from.get(function, []):
                    value = argument_for(site, function, name)
                    if value is not None:
                        pending.append((value, site.frame, left - 1))
        for inner in walk(each):
            if isinstance(inner, cst.Call):
                call = script.values.record(inner)
                for target in script.values.functions_of(call) if call else []:
                    for value in target.returns:
                        pending.append((value, Frame("function", None, target.file, target), left - 1))


def argument_for(call: Call, function: Function, parameter: str) -> cst.CSTNode | None:
    """What a call gives to a parameter."""
    index = function.parameters.index(parameter)
    if function.cls is not None and "staticmethod" not in function.decorators:
        index -= 1
    return call.argument(parameter, index if index >= 0 else None)


def depends_on_ranks(script: Script, node: cst.CSTNode | None, frame: Frame) -> bool:
    """True if an expression, or what its names were given, or a class that it makes, speaks of ranks."""
    for each, where in origins(script, node, frame):
        if _RANK_WORDS.search(text_of(each)):
            return True
        for thing in script.things(each, where):
            if thing.cls is not None and _RANK_WORDS.search(text_of(thing.cls.node)):
                return True
            if thing.site is not None and _RANK_WORDS.search(thing.site.text):
                return True
    return False


_DIVIDERS = ("chunk", "tensor_split", "array_split", "split")
_SELECTORS = (*_DIVIDERS, "islice", "range", "arange", "Subset", "skip")
_SHARDERS = ("shard", "scatter", "scatter_object_list", "split_dataset_by_node", "split_between_processes")


def is_of_rank(script: Script, node: cst.CSTNode | None, frame: Frame, *others: str) -> bool:
    """True if an expression is made of a rank, or of `others`: what its names stand for, or what they were given."""
    return any(
        script.values.kinds(inner, where) & {"rank", "local rank", *others}
        for each, where in origins(script, node, frame, depth=3)
        for inner in walk(each)
        if isinstance(inner, cst.Name | cst.Attribute | cst.Call | cst.Subscript)
    )


def divides_by_hand(script: Script) -> bool:
    """True if the script itself divides data among ranks: a slice, a remainder or a range made of the rank."""
    slices = [(node, frame) for file in script.files for node, frame in file.slices if script.is_reached(frame)]
    for call in script.calls:
        if call.last in _SHARDERS:
            return True
        others = ("world size",) if call.last in _DIVIDERS else ()
        if call.last in _SELECTORS and any(is_of_rank(script, each, call.frame, *others) for each in call.arguments):
            return True
    return any(is_of_rank(script, node, frame) for node, frame in slices)


def number(script: Script, node: cst.CSTNode | None, frame: Frame, depth: int = 4) -> int | None:
    """The whole number that an expression is, if it is one: a literal, a constant, the default of an option."""
    if isinstance(node, cst.Integer):
        return int(text_of(node).replace("_", ""), 0)
    name = dotted(node)
    if not name or isinstance(node, cst.Subscript):
        return None
    values = assignments_to(script, name, frame)
    if len(values) == 1 and isinstance(values[0].value, cst.Integer):
        return int(text_of(values[0].value).replace("_", ""), 0)
    if name.startswith(("args.", "opt.", "opts.", "cfg.", "self.args.")):
        option = name.rpartition(".")[2]
        for call in script.named(".add_argument"):
            flags = [text_of(each).strip("\"'").lstrip("-").replace("-", "_") for each in call.arguments[:2]]
            default = call.argument("default")
            if option in flags and isinstance(default, cst.Integer):
                return int(text_of(default).replace("_", ""), 0)
    if depth and frame.function is not None and name in frame.function.parameters:
        sites = script.values.called_from.get(frame.function, [])
        given = {number(script, argument_for(site, frame.function, name), site.frame, depth - 1) for site in sites[:4]}
        return given.pop() if len(given) == 1 else None
    return None


def is_true(node: cst.CSTNode | None) -> bool:
    """True of the literal True."""
    return text_of(node) == "True"


def is_nothing(node: cst.CSTNode | None) -> bool:
    """True if an argument isn't given, or is None."""
    return node is None or text_of(node) == "None"


def on_ranks(script: Script, call: Call) -> bool:
    """False of what surely runs in a process that only starts ranks."""
    if not script.starts_ranks or not script.values.passed:
        return True
    function = call.frame.function
    seen: set[int] = set()
    pending = [function] if function is not None else []
    while pending:
        each = pending.pop()
        if each in script.values.passed or each.frame.function in script.values.passed:
            return True
        if id(each) in seen:
            continue
        seen.add(id(each))
        pending += [site.frame.function for site in script.values.called_from.get(each, []) if site.frame.function]
    return False


def on_all_ranks(script: Script, call: Call) -> bool:
    """True if a call runs on every rank, as far as one can see: no condition around it looks like a rank's."""
    if script.perhaps_some_ranks_only(call.frame) or not on_ranks(script, call):
        return False
    for frame in call.frame.outwards():
        if frame.kind == "except":
            return False
        if frame.kind == "with" and re.search(r"_first|rank_zero|main_process", heading(frame)):
            return False
    return True


def heading(frame: Frame) -> str:
    """What stands behind `with`."""
    return ", ".join(text_of(item.item) for item in frame.node.items) if isinstance(frame.node, cst.With) else ""


def has_argument_of_rank(script: Script, call: Call) -> bool:
    """True if an argument speaks of the rank, so that ranks do it differently or say who they are."""
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
        script.values.kinds(inner, call.frame) & {"rank", "local rank"}
        for each in call.arguments
        for inner in walk(each)
        if isinstance(inner, cst.Name | cst.Attribute)
    )


def in_training_or_evaluation(script: Script, call: Call) -> bool:
    """True if a call stands in a loop of the training, or in a function that evaluates."""
    around = [loop for loop in script.loops_around(call.frame) if not loop.is_comprehension]
    if any(loop in script.training_loops or loop in script.evaluation_loops for loop in around):
        return True
    function = call.frame.function
    return function is not None and any(
        loop.frame.function is function for loop in [*script.evaluation_loops, *script.step_loops]
    )


def runs(script: Script, calls: Sequence[Call], is_wanted: Callable[[Call], bool], depth: int = 3) -> bool:
    """True if such a call is among these, or in the script's own functions that they may run.

    A method of an object that isn't known may be any of that name.
    """
    if any(map(is_wanted, calls)):
        return True
    targets = {target for call in calls for target in script.values.functions_of(call)}
    unknown = {call.last for call in calls if call.receiver is not None and not script.values.functions_of(call)}
    targets |= {each for file in script.files for each in file.all_functions if each.cls and each.name in unknown}
    inside = [call for call in script.calls if call.frame.function in targets]
    return depth > 0 and bool(inside) and runs(script, inside, is_wanted, depth - 1)


def exclude_each_other(one: Frame, other: Frame) -> bool:
    """True if two frames stand in branches of which never both run: of one `if`, or of two with the same test."""
    tests = [dict(map(_plain_test, (each for each in frame.outwards() if each.kind == "if"))) for frame in (one, other)]
    return any(tests[1].get(text, holds) != holds for text, holds in tests[0].items())


def _plain_test(frame: Frame) -> tuple[str, bool]:
    """The text of a test without `not`, and whether that holds."""
    text = text_of(frame.test)
    plain = re.sub(r"\bis not None\b", "is None", re.sub(r"^not ", "", text))
    return plain, frame.holds ^ (plain != text)


def per_step(script: Script, call: Call) -> bool:
    """True if a call runs in every round of a step loop."""
    return any(script.in_every_round(call.frame, loop) for loop in script.step_loops)


def wrappers_at(script: Script, node: cst.CSTNode | None, frame: Frame, line: int, depth: int = 3) -> list[Thing]:
    """The wrappers that an expression surely stands for at a line; none if it may be the model itself.

    After `model = DDP(model)` the name stands for both, and which it is depends on the line.
    """
    things = script.things(node, frame)
    wrapped = [each for each in things if each.kind in ("wrapped", "data parallel") and each.site is not None]
    if not wrapped or not any(each.kind in ("model", "instance", "unknown") for each in things):
        return wrapped
    name = dotted(node)
    if not name or not isinstance(node, cst.Name | cst.Attribute):
        return []
    for assignment in assignments_to(script, name, frame):
        made = script.things(assignment.value, assignment.frame)
        is_wrapping = isinstance(assignment.value, cst.Call) and any(
            item.kind in ("wrapped", "data parallel") for each in made for item in (each, *_flat(each))
        )
        if is_wrapping and (assignment.line < line or assignment.frame.function is not frame.function):
            return wrapped
    function = frame.function
    if depth and function is not None and name in function.parameters:
        sites = script.values.called_from.get(function, [])
        given = [(argument_for(site, function, name), site) for site in sites]
        if given and all(wrappers_at(script, each, site.frame, site.line, depth - 1) for each, site in given):
            return wrapped
    return []


def models_of(optimizer: Call) -> set[str]:
    """The names of the models whose parameters an optimizer is given."""
    calls = [each for each in walk(optimizer.argument("params", 0)) if isinstance(each, cst.Call)]
    methods = [each.func for each in calls if isinstance(each.func, cst.Attribute)]
    return {dotted(each.value) for each in methods if each.attr.value in ("parameters", "named_parameters")} - {""}


def has_wrapped(script: Script) -> bool:
    """True if a wrapper for data parallelism is made somewhere."""
    return any("wrapped" in script.kinds_made(call) for call in script.calls if call.name)


def _flat(thing: Thing) -> list[Thing]:
    return [inner for item in thing.items for inner in item]
