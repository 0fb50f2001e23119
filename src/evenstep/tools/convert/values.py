"""Which names of a script hold models, optimizers, loaders, batches or writers, as convert needs it."""

from __future__ import annotations

import libcst as cst

from evenstep.tools.reading import values
from evenstep.tools.reading.tree import File, Node
from evenstep.tools.reading.values import LAYERS, NOTHING, Value, Values, objects_among


class Flow(values.Flow):
    """Follows values through a script of one file. A model, its parts and its wrappers count as one object."""

    def __init__(self, script: File) -> None:
        self.script = script
        super().__init__([script], {})

    def of(self, node: Node, kind: str | None = None) -> Values:
        """The values that an expression may have, or those of one kind. A part of a model counts as the model."""
        held = super().of(node)
        found = frozenset(each for each in held if each.kind not in ("part", *values.WRAPPERS)) | objects_among(held)
        return found if kind is None else values.of_kind(found, kind)

    def is_a(self, node: Node, kind: str) -> bool:
        """Whether an expression may have a value of a kind."""
        return bool(self.of(node, kind))

    def is_module(self, value: Value) -> bool:
        """Whether an object is an `nn.Module`: of torch, or of a class of the script that derives from one."""
        return self.is_module_class(value.definition) or value.made_by.startswith(LAYERS)

    def functions(self, call: cst.Call) -> list[cst.FunctionDef]:
        """The functions of the script that a call may run."""
        return [value.site for value in self.of(call.func) if isinstance(value.site, cst.FunctionDef)]

    def loaders(self, node: Node) -> Values:
        """The loaders that an expression may be, or whose batches it yields."""
        return values.loaders_among(self.of(node))

    def name_of(self, held: Values, at: Node, *, among: Values | None = None) -> str | None:
        """The name, or attribute of `self`, that holds exactly these values where `at` is; None if there is none.

        Local names come first, then attributes of `self`, then outer names: these may have changed when the function
        runs.

        Args:
            held: The values, all of one kind.
            at: The node where the name is used.
            among: Ignore other values of the kind; None: consider all.
        """
        script = self.script
        scopes = [script.function(at)]
        while scopes[-1] is not None:
            scopes.append(script.function(scopes[-1]))
        (kind,) = {value.kind for value in held}

        def holds(every: Values) -> bool:
            found = values.of_kind(every | objects_among(every), kind)
            if values.of_kind(every, "iterator"):
                return False  # `loader = tqdm(loader)`
            return (found if among is None else found & among) == held

        own, *outer = (
            [
                name
                for name, by in script.bindings.get(scope, {}).items()
                if script.scope(name, at) is scope
                and holds(NOTHING.union(*(self.of(each.name if isinstance(each, cst.Param) else each) for each in by)))
            ]
            for scope in scopes
        )
        definition = script.class_of(scopes[0]) if scopes[0] is not None else None
        if definition is not None:
            named = dict.fromkeys(name for owner, name in self._attributes if owner in self._related[definition])
            own += [f"self.{name}" for name in named if holds(self._attribute_of(definition, name))]
        return next(iter([*own, *(name for names in outer for name in names)]), None)
