"""Who is what in a script, as convert asks: which names hold models, optimizers, loaders, batches, writers."""

from __future__ import annotations

import libcst as cst

from evenstep.tools.reading import values
from evenstep.tools.reading.tree import File, Node
from evenstep.tools.reading.values import LAYERS, NOTHING, Value, Values, objects_among


class Flow(values.Flow):
    """Follows values through a script, which is one file. A model and what is wrapped around it are one object."""

    def __init__(self, script: File) -> None:
        self.script = script
        super().__init__([script], {})

    def of(self, node: Node, kind: str | None = None) -> Values:
        """What an expression may be; a part of a model is the model."""
        held = super().of(node)
        found = frozenset(each for each in held if each.kind not in ("part", *values.WRAPPERS)) | objects_among(held)
        return found if kind is None else values.of_kind(found, kind)

    def is_a(self, node: Node, kind: str) -> bool:
        """Whether an expression may be of a kind."""
        return bool(self.of(node, kind))

    def is_module(self, value: Value) -> bool:
        """Whether an object is a module of torch's, or of a class of the script that derives from one."""
        return self.is_module_class(value.definition) or value.made_by.startswith(LAYERS)

    def functions(self, call: cst.Call) -> list[cst.FunctionDef]:
        """The functions of the script that a call may call."""
        return [value.site for value in self.of(call.func) if isinstance(value.site, cst.FunctionDef)]

    def loaders(self, node: Node) -> Values:
        """The loaders that an expression is one of, or gives the batches of."""
        return values.loaders_among(self.of(node))

    def name_of(self, held: Values, at: Node, *, among: Values | None = None) -> str | None:
        """The name, or attribute of `self`, that holds these values and no others at a place.

        The function's own names come first, then its object's: a global may be another one when it is called.

        Args:
            held: All of one kind.
            at: The place.
            among: The values that matter; None: all of the kind.
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
