"""Who is what in a script: which names hold models, optimizers, loaders, batches, writers.

Values flow along assignments, arguments, returns and attributes until nothing changes, whatever the order in which
statements run. That is coarse, and right for training scripts, where a name hardly ever means two things.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import libcst as cst

from evenstep.tools.convert.source import Node, Script, target_names

_LOADERS = ("loader", "iterator")
_ROUNDS = 12  # more than the longest chain of calls in a script
_SAME = {"to", "cuda", "cpu", "train", "eval", "float", "double", "half", "bfloat16", "apply", "requires_grad_"}
_SAME_BATCH = _SAME | {"long", "int", "bool", "contiguous", "detach", "clone", "values", "items", "type", "unsqueeze"}
_SAME_BATCH |= {
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "pin_memory",
    "numpy",
    "reshape_as",
    "view_as",
    "requires_grad_",
}
_NO_BATCH = {"shape", "dtype", "device", "ndim", "is_cuda"}
PASSING = {"iter", "tqdm", "trange", "track", "islice", "compile", "auto"}
WRITERS = ("SummaryWriter",)
_LAYERS = ("torch.nn.", "torchvision.models", "torch.hub.", "torchvision.ops")
BUILTINS = set(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__)


@dataclass(frozen=True)
class Value:
    """Something that a script makes, known by where it is made.

    Attributes:
        kind: "loader", "iterator" (what gives a loader's batches one by one), "object", "optimizer", "scaler",
            "writer", "batch", "parameters", "items", "function", "class".
        site: The call that makes it; of an iterator that of its loader, of a batch what it is taken from, of a function
            or class its definition.
        definition: The class of an object, if it is the script's own.
    """

    kind: str
    site: Node
    definition: cst.ClassDef | None = None


Values = frozenset[Value]
_NONE: Values = frozenset()


class Flow:
    """Follows values through a script.

    Attributes:
        calls: By function of the script, the calls of it.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self._names: dict[tuple[cst.FunctionDef | None, str], Values] = {}
        self._attributes: dict[tuple[cst.ClassDef | None, str], Values] = {}
        self._returns: dict[cst.FunctionDef, Values] = {}
        self._instances: dict[cst.ClassDef, Values] = {}
        self._bases = {node: self._base(node) for node in script.nodes if isinstance(node, cst.ClassDef)}
        self.calls: dict[cst.FunctionDef, list[cst.Call]] = {}
        self._with_optimizers = {
            script.function(node) for node in script.nodes if isinstance(node, cst.Call) and self._is_optimizer(node)
        }
        self._changed = True
        self._busy: set[Node] = set()  # expressions that are being read: `kept = [kept[k] for k in some]`
        self._statements = [
            node
            for node in script.nodes
            if isinstance(
                node,
                cst.Assign | cst.AnnAssign | cst.For | cst.CompFor | cst.WithItem | cst.Return | cst.Yield | cst.Call,
            )
        ]
        for _ in range(_ROUNDS):
            if not self._changed:
                break
            self._changed = False
            for node in self._statements:
                self._follow(node)

    # ------------------------------------------------------------------ asking

    def of(self, node: Node, kind: str | None = None) -> Values:
        """What an expression may be."""
        found = self._of(node)
        return found if kind is None else frozenset(value for value in found if value.kind == kind)

    def is_a(self, node: Node, kind: str) -> bool:
        """Whether an expression may be of a kind."""
        return bool(self.of(node, kind))

    def is_module_class(self, definition: cst.ClassDef | None) -> bool:
        """Whether a class of the script derives from `nn.Module`."""
        while definition is not None:
            above = None
            for base in definition.bases:
                name = self.script.qualified(base.value) or ""
                if name.startswith("torch.nn.") or name.endswith("Module"):
                    return True
                above = above or self._class_named(base.value)
            definition = above
        return False

    def is_module(self, value: Value) -> bool:
        """Whether an object is a module of torch's, or of a class of the script that derives from one."""
        made = self.script.qualified(value.site.func) if isinstance(value.site, cst.Call) else None
        return self.is_module_class(value.definition) or (made or "").startswith(_LAYERS)

    def functions(self, call: cst.Call) -> list[cst.FunctionDef]:
        """The functions of the script that a call may call."""
        return [value.site for value in self._of(call.func) if isinstance(value.site, cst.FunctionDef)]

    def loaders(self, node: Node) -> Values:
        """The loaders that an expression is one of, or gives the batches of."""
        return frozenset(replace(value, kind="loader") for value in self._of(node) if value.kind in _LOADERS)

    def name_of(self, values: Values, at: Node, *, among: Values | None = None) -> str | None:
        """What holds these values, and no others, at a place: a name, or an attribute of `self`.

        The function's own names come first, then its object's: a global may be another one when it is called.

        Args:
            values: All of one kind.
            at: The place.
            among: The values that matter; None: all of the kind.
        """
        script = self.script
        scopes = [script.function(at)]
        while scopes[-1] is not None:
            scopes.append(script.function(scopes[-1]))
        (kind,) = {value.kind for value in values}

        def holds(*held: Values) -> bool:
            every = frozenset().union(*held)
            found = frozenset(value for value in every if value.kind == kind)
            if any(value.kind == "iterator" for value in every):
                return False  # `loader = tqdm(loader)`
            return (found if among is None else found & among) == values

        own, *outer = (
            [
                name
                for name, by in script.bindings.get(scope, {}).items()
                if script.scope(name, at) is scope
                and holds(*(self._of(each.name if isinstance(each, cst.Param) else each) for each in by))
            ]
            for scope in scopes
        )
        base = self._bases.get(script.class_of(scopes[0])) if scopes[0] is not None else None  # type: ignore[arg-type]
        attributes = [
            f"self.{name}" for (owner, name), held in self._attributes.items() if owner is base and holds(held)
        ]
        return next(iter([*own, *(attributes if base else []), *(name for names in outer for name in names)]), None)

    # ------------------------------------------------------------------ following

    def _add(self, table: dict, key: object, values: Values) -> None:  # type: ignore[type-arg]
        known = table.get(key, _NONE)
        if not values <= known:
            table[key] = known | values
            self._changed = True

    def _follow(self, node: Node) -> None:
        match node:
            case cst.Assign():
                for target in node.targets:
                    self._bind(target.target, node.value)
            case cst.AnnAssign() if node.value is not None:
                self._bind(node.target, node.value)
            case cst.WithItem() if node.asname is not None:
                self._bind(node.asname.name, node.item)
            case cst.For() | cst.CompFor():
                self._bind_loop(node.target, node.iter)
            case cst.Return() if node.value is not None:
                function = self.script.function(node)
                if function is not None:
                    self._add(self._returns, function, self._of(node.value))
            case cst.Yield():
                self._follow_yield(node)
            case cst.Call():
                self._link(node)

    def _follow_yield(self, node: cst.Yield) -> None:
        """A function that yields a loader's batches is as good as the loader."""
        function = self.script.function(node)
        if function is None or node.value is None:
            return
        if isinstance(node.value, cst.From):
            self._add(self._returns, function, self._iterated(node.value.item))
            return
        script = self.script
        held = [by for name in script.inside(node.value) for by in script.bound(getattr(name, "value", ""), name)]
        if any(script.order(by) > script.order(node) for by in held if isinstance(by, cst.Name)):
            return  # a batch that was kept: the loader has given another since
        for value in self.of(node.value, "batch"):
            if any(script.is_inside(value.site, loop) for loop in script.loops(node)):
                self._add(self._returns, function, self._iterated(value.site))

    def _iterated(self, node: Node) -> Values:
        return frozenset(replace(value, kind="iterator") for value in self.loaders(node))

    def _bind(self, target: Node, value: Node) -> None:
        if isinstance(target, cst.Tuple | cst.List):
            if isinstance(value, cst.Tuple | cst.List) and len(value.elements) == len(target.elements):
                for each, part in zip(target.elements, value.elements, strict=True):
                    self._bind(each.value, part.value)
                return
            self._bind_parts(target, self._of(value))
            return
        self._bind_values(target, self._of(value))

    def _bind_parts(self, target: cst.Tuple | cst.List, values: Values) -> None:
        for index, each in enumerate(target.elements):
            parts = frozenset().union(*(self._part(value, index) for value in values)) if values else _NONE
            if isinstance(each.value, cst.Tuple | cst.List):
                self._bind_parts(each.value, parts)
            else:
                self._bind_values(each.value, parts)

    def _part(self, value: Value, index: int) -> Values:
        if value.kind == "batch":
            return frozenset({value})
        if isinstance(value.site, cst.Tuple | cst.List) and value.kind == "items" and index < len(value.site.elements):
            return self._of(value.site.elements[index].value)
        if value.kind == "items":
            return self._elements(value)
        return _NONE

    def _bind_values(self, target: Node, values: Values) -> None:
        if not values:
            return
        match target:
            case cst.Name():
                self._add(self._names, (self.script.scope(target.value, target), target.value), values)
            case cst.Attribute():
                for base in self._of(target.value):
                    if base.definition is not None:
                        self._add(self._attributes, (self._bases[base.definition], target.attr.value), values)
            case cst.StarredElement():
                self._bind_values(target.value, values)
            case cst.Subscript():  # models["G"] = ...
                for base in self.of(target.value, "items"):
                    self._add(self._returns, base.site, values)

    def _bind_loop(self, target: Node, source: Node) -> None:
        if isinstance(source, cst.Call):
            name = self._short(source)
            if name == "enumerate" and source.args:
                if isinstance(target, cst.Tuple) and len(target.elements) == 2:
                    self._bind_loop(target.elements[1].value, source.args[0].value)
                return
            if name == "zip" and isinstance(target, cst.Tuple) and len(target.elements) == len(source.args):
                for element, argument in zip(target.elements, source.args, strict=True):
                    self._bind_loop(element.value, argument.value)
                return
            if name in ("tqdm", "track", "progress") and source.args:
                self._bind_loop(target, source.args[0].value)
                return
            if isinstance(source.func, cst.Attribute) and source.func.attr.value == "items" and not source.args:
                parts = [self._elements(value) for value in self.of(source.func.value, "items")]
                if parts and isinstance(target, cst.Tuple) and len(target.elements) == 2:
                    self._bind_values(target.elements[1].value, frozenset().union(*parts))
                    return
        for value in self._of(source):
            if value.kind in _LOADERS:
                batch = frozenset({Value("batch", source)})
                for name_node in target_names(target):
                    self._bind_values(name_node, batch)
            elif value.kind == "batch":
                for name_node in target_names(target):
                    self._bind_values(name_node, frozenset({value}))
            elif value.kind == "items":
                if isinstance(target, cst.Tuple):
                    for each in self._elements(value):
                        self._bind_parts(target, frozenset({each}))
                else:
                    self._bind_values(target, self._elements(value))

    def _elements(self, value: Value) -> Values:
        match value.site:
            case cst.Tuple() | cst.List() | cst.Set():
                parts = [self._of(element.value) for element in value.site.elements]
            case cst.Dict():
                parts = [self._of(element.value) for element in value.site.elements]
            case cst.DictComp():
                parts = [self._of(value.site.value)]
            case cst.ListComp() | cst.GeneratorExp():
                parts = [self._of(value.site.elt)]
            case _:
                parts = []
        return frozenset().union(self._returns.get(value.site, _NONE), *parts)  # type: ignore[call-overload]

    def _link(self, call: cst.Call) -> None:
        """Arguments become parameters."""
        for value in self._of(call.func):
            function, skip = value.site, 0
            if isinstance(function, cst.ClassDef) and value.kind == "class":
                made = Value("object", call, function)
                self._add(self._instances, function, frozenset({made}))
                found = self._method(function, "__init__")
                if found is None:
                    continue
                function, skip = found, 1
            elif value.kind == "object" and value.definition is not None:
                is_module = self.is_module_class(value.definition)
                found = self._method(value.definition, "forward" if is_module else "__call__")
                if found is None:
                    continue
                function, skip = found, 1
            elif isinstance(function, cst.FunctionDef):
                is_static = any(self.script.code(each.decorator) == "staticmethod" for each in function.decorators)
                if self.script.class_of(function) is not None and not is_static:
                    skip = 1
            if not isinstance(function, cst.FunctionDef):
                continue
            known = self.calls.setdefault(function, [])
            if call not in known:
                known.append(call)
                self._changed = True
            names = [*function.params.posonly_params, *function.params.params][skip:]
            by_name = {each.name.value: each for each in [*names, *function.params.kwonly_params]}
            for index, argument in enumerate(call.args):
                if argument.star:
                    continue
                if argument.keyword is not None:
                    parameter = by_name.get(argument.keyword.value)
                else:
                    parameter = names[index] if index < len(names) else None
                if parameter is not None:
                    self._add(self._names, (function, parameter.name.value), self._of(argument.value))

    # ------------------------------------------------------------------ expressions

    def _of(self, node: Node) -> Values:
        if node in self._busy:
            return _NONE
        self._busy.add(node)
        found = self._read(node)
        self._busy.discard(node)
        return found

    def _read(self, node: Node) -> Values:
        match node:
            case cst.Name():
                return self._of_name(node)
            case cst.Attribute():
                return self._of_attribute(node)
            case cst.Call():
                return self._of_call(node)
            case cst.Tuple() | cst.List() | cst.Dict() | cst.DictComp() | cst.ListComp() | cst.GeneratorExp():
                if isinstance(node, cst.ListComp | cst.GeneratorExp):
                    inner = self.of(node.elt, "batch") or self.of(node.for_in.iter, "parameters")
                    if inner:
                        return inner
                if isinstance(node, cst.DictComp) and self.of(node.value, "batch"):
                    return self.of(node.value, "batch")
                return frozenset({Value("items", node)})
            case cst.Subscript():
                return self._of_subscript(node)
            case cst.IfExp():
                return self._of(node.body) | self._of(node.orelse)
            case cst.BooleanOperation():
                return self._of(node.left) | self._of(node.right)
            case cst.BinaryOperation():
                return self.of(node.left, "parameters") | self.of(node.right, "parameters")
            case cst.NamedExpr() | cst.Await():
                return self._of(node.value if isinstance(node, cst.NamedExpr) else node.expression)
        return _NONE

    def _of_name(self, node: cst.Name) -> Values:
        scope = self.script.scope(node.value, node)
        found = self._names.get((scope, node.value), _NONE)
        for by in self.script.bindings.get(scope, {}).get(node.value, []):
            if isinstance(by, cst.FunctionDef):
                found |= {Value("function", by)}
            elif isinstance(by, cst.ClassDef):
                found |= {Value("class", by)}
            elif isinstance(by, cst.Param) and scope is not None:
                definition = self.script.class_of(scope)
                first = next(iter(scope.params.params), None)
                if definition is not None and first is by:
                    found |= self._selves(definition)
        return found

    def _selves(self, definition: cst.ClassDef) -> Values:
        base = self._bases[definition]
        found = [values for made, values in self._instances.items() if self._bases[made] is base]
        return frozenset({Value("object", definition, definition)}).union(*found)

    def _of_attribute(self, node: cst.Attribute) -> Values:
        bases = self._of(node.value)
        found: Values = _NONE
        is_self = isinstance(node.value, cst.Name) and node.value.value == "self"
        for base in bases:
            if base.kind == "batch" and node.attr.value not in _NO_BATCH:
                found |= {base}
            if base.kind == "object":
                if node.attr.value == "module":
                    found |= {base}
                if base.definition is not None:
                    method = self._method(base.definition, node.attr.value)
                    if method is not None:
                        found |= {Value("function", method)}
                    elif is_self or not self.is_module_class(base.definition):
                        found |= self._attributes.get((self._bases[base.definition], node.attr.value), _NONE)
                    else:
                        found |= {base}  # a part of a model: the model counts
                elif node.attr.value != "module":
                    found |= {base}
        return found

    def _of_subscript(self, node: cst.Subscript) -> Values:
        found: Values = _NONE
        for base in self._of(node.value):
            if base.kind == "batch":
                found |= {base}
            elif base.kind == "items":
                found |= self._item(base, node)
        return found

    def _item(self, base: Value, node: cst.Subscript) -> Values:
        index = node.slice[0].slice
        key = index.value if isinstance(index, cst.Index) else None
        if isinstance(base.site, cst.Dict) and isinstance(key, cst.SimpleString):
            for element in base.site.elements:
                if isinstance(element, cst.DictElement) and self.script.code(element.key) == key.value:
                    return self._of(element.value)
        if isinstance(base.site, cst.Tuple | cst.List) and isinstance(key, cst.Integer):
            elements = base.site.elements
            return self._of(elements[int(key.value)].value) if int(key.value) < len(elements) else _NONE
        return self._elements(base)

    def _of_call(self, node: cst.Call) -> Values:
        name = self.script.qualified(node.func)
        short = self._short(node)
        first = node.args[0].value if node.args else None
        if name is not None:
            known = self._of_known_call(node, name, first)
            if known is not None:
                return known
        if isinstance(node.func, cst.Attribute):
            found = self._of_method_call(node, node.func)
            if found is not None:
                return found
        if short in PASSING and isinstance(node.func, cst.Name):
            return self._passed(node)
        if short == "next" and first is not None and self.loaders(first):
            return frozenset({Value("batch", first)})
        if short in ("map", "filter") and len(node.args) > 1:
            return self._of(node.args[1].value)
        callees = self._of(node.func)
        if callees:
            found = _NONE
            for value in callees:
                if isinstance(value.site, cst.ClassDef) and value.kind == "class":
                    above = {(self.script.qualified(base.value) or "").rsplit(".", 1)[-1] for base in value.site.bases}
                    found |= {Value("writer" if above & {*WRITERS} else "object", node, value.site)}
                elif isinstance(value.site, cst.FunctionDef):
                    found |= self._returned(value.site, node)
            return found
        if isinstance(node.func, cst.Name) and node.func.value in BUILTINS:
            return _NONE
        is_layer = name is not None and name.startswith(_LAYERS) and not name.startswith("torch.nn.functional")
        if name is not None and name.startswith("torch") and not is_layer:
            return _NONE
        if name is None and isinstance(node.func, cst.Name):
            by = self.script.bound(node.func.value, node)
            is_parameter = bool(by) and all(isinstance(each, cst.Param) for each in by)
            return _NONE if is_parameter or not (by or self.script.has_stars) else frozenset({Value("object", node)})
        if name is None and isinstance(node.func, cst.Attribute):
            return _NONE
        return frozenset({Value("object", node)})

    def _passed(self, node: cst.Call) -> Values:
        passed = frozenset().union(*(self._of(argument.value) for argument in node.args))
        return frozenset(replace(value, kind="iterator") if value.kind == "loader" else value for value in passed)

    def _of_known_call(self, node: cst.Call, name: str, first: Node | None) -> Values | None:
        short = name.rsplit(".", 1)[-1]
        if name.startswith("torch.") and short == "DataLoader":
            return frozenset({Value("loader", node)})
        if self._is_optimizer(node):
            return frozenset({Value("optimizer", node)})
        if short == "GradScaler":
            return frozenset({Value("scaler", node)})
        if short in WRITERS:
            return frozenset({Value("writer", node)})
        if short in ("DataParallel", "DistributedDataParallel", "compile") or short in PASSING:
            return self._passed(node) if short not in ("DataParallel", "DistributedDataParallel") or first else _NONE
        return None

    def _of_method_call(self, node: cst.Call, func: cst.Attribute) -> Values | None:
        method = func.attr.value
        bases = self._of(func.value)
        batches = frozenset(value for value in bases if value.kind == "batch")
        if batches:
            return batches if method in _SAME_BATCH else _NONE
        objects = frozenset(value for value in bases if value.kind == "object")
        if objects and method in ("parameters", "named_parameters"):
            return frozenset(replace(value, kind="parameters") for value in objects)
        if objects and method in _SAME:
            return objects
        if any(value.kind == "items" for value in bases) and method in ("values", "items"):
            return bases
        if objects and all(value.definition is None for value in objects):
            return _NONE
        return None

    def _returned(self, function: cst.FunctionDef, call: cst.Call) -> Values:
        """What a call of the script's own function gives; what it makes for its caller counts as made by the call."""
        found: Values = _NONE
        for value in self._returns.get(function, _NONE):
            is_made_there = value.kind == "object" and self.script.is_inside(value.site, function)
            if is_made_there and function not in self._with_optimizers:
                value = replace(value, site=call)
            found |= {value}
        return found

    # ------------------------------------------------------------------ names

    def _short(self, call: cst.Call) -> str:
        return self.script.code(call.func).rsplit(".", 1)[-1]

    def _is_optimizer(self, call: cst.Call) -> bool:
        name = self.script.qualified(call.func) or ""
        parts = name.split(".")
        if name.startswith("torch.optim.") and "lr_scheduler" not in parts and "swa_utils" not in parts:
            return parts[-1][:1].isupper()
        return bool(parts[-1:] and parts[-1] in ("AdamW", "Lion", "Adafactor", "LAMB") and call.args)

    def _class_named(self, node: Node) -> cst.ClassDef | None:
        if not isinstance(node, cst.Name):
            return None
        return next((by for by in self.script.bound(node.value, node) if isinstance(by, cst.ClassDef)), None)

    def _base(self, definition: cst.ClassDef) -> cst.ClassDef:
        """The topmost of the script's own classes that one derives from: attributes are kept there."""
        for _ in range(20):
            above = next((found for base in definition.bases if (found := self._class_named(base.value))), None)
            if above is None or above is definition:
                break
            definition = above
        return definition

    def _method(self, definition: cst.ClassDef, name: str) -> cst.FunctionDef | None:
        for _ in range(20):
            for node in definition.body.body:
                if isinstance(node, cst.FunctionDef) and node.name.value == name:
                    return node
            above = next((found for base in definition.bases if (found := self._class_named(base.value))), None)
            if above is None or above is definition:
                return None
            definition = above
        return None


def arguments(call: cst.Call, names: Iterable[str]) -> dict[str, cst.Arg]:
    """The arguments of a call by name, given the names of positional ones."""
    positional = list(names)
    found: dict[str, cst.Arg] = {}
    for index, argument in enumerate(call.args):
        if argument.keyword is not None:
            found[argument.keyword.value] = argument
        elif not argument.star and index < len(positional):
            found[positional[index]] = argument
    return found
