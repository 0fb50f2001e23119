"""Models: which are trained, where they are wrapped, and how the script uses them afterwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import libcst as cst
from libcst.helpers import parse_template_expression

from evenstep.tools.convert.edits import Work
from evenstep.tools.convert.loops import Loops, Pass
from evenstep.tools.convert.losses import SUM
from evenstep.tools.reading.tree import Node, Statement
from evenstep.tools.reading.values import Value, Values

# Attributes that the wrapper has or forwards to the module. `state_dict` isn't one: its names begin with "module.".
_MODULES_OWN = {"parameters", "train", "eval", "zero_grad", "to", "cuda", "cpu", "buffers", "requires_grad_"}
_MODULES_OWN |= {"training", "module", "apply", "float", "double", "half", "bfloat16", "backward", "no_sync"}
_MODULES_OWN |= {"register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "accumulate"}
_MODULES_OWN |= {"forward", "join"}
_ASKING = {"hasattr", "getattr", "setattr", "isinstance", "type"}
_WRAPPER = "evenstep.DistributedDataParallel"
_BATCH_NORM = ("BatchNorm", "torchvision.models", "torch.hub")
# Libraries without models that may have a batch norm, except torchvision's and torch.hub's.
LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchvision", "evenstep", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "seaborn", "PIL", "cv2"),
    *("tqdm", "rich", "yaml", "hydra", "omegaconf", "wandb", "mlflow", "tensorboardX", "datasets", "tokenizers"),
}
_LAYER = re.compile(r"torch\.nn\.(Linear|Bilinear|Conv\dd|Embedding|LSTM|GRU|RNN)")
_BRANCHES = (cst.If, cst.Else, cst.Try, cst.ExceptHandler)


class Models:
    """The models that optimizers of a script train.

    Attributes:
        trained: These models.
    """

    def __init__(self, work: Work, loops: Loops) -> None:
        self._work, self._loops = work, loops
        self._script, self._flow = work.script, work.flow
        self._wrapped_at: dict[Value, Node | None] = {}  # by model, the statement that its wrapper stands before
        names = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
        self._parallel = [call for call in work.calls() if work.script.qualified(call.func) in names]
        self.trained = self._find_trained()
        self._has_batch_norm = self._may_have_batch_norm()

    def _may_have_batch_norm(self) -> bool:
        """Whether a model may have a batch norm: the script names one, or takes layers from code that isn't read."""
        script = self._script
        made = [each.site.func for each in self.trained if isinstance(each.site, cst.Call)]
        if len(made) == len(self.trained) and all(_LAYER.fullmatch(script.qualified(each) or "") for each in made):
            return False
        named = {script.qualified(node) or "" for node in script.nodes if isinstance(node, cst.Name | cst.Attribute)}
        return (
            script.has_stars
            or any(each.split(".")[0] not in LIBRARIES for each in script.imports.values())
            or any(name in each for each in named for name in _BATCH_NORM)
        )

    # ------------------------------------------------------------------ which are trained

    def _find_trained(self) -> Values:
        script, found = self._script, set()
        for call in self._work.calls():
            if not self._is_made_by(call, "optimizer"):
                continue
            own = self._parameters_in(call)
            if not own:  # groups that are built up in a loop: take the one model whose parameters the function reads
                asked = self._parameters_in(script.function(call) or script.module)
                own = asked if len(asked) == 1 else set()
            own = {value for value in own if not self._is_made_behind(value.site, call)} or own
            if self._is_returned(call):  # model.configure_optimizers(...)
                own = {value for value in own if not isinstance(value.site, cst.ClassDef)} or own
            found |= own
            for reason in self._why_not(call, own):
                self._work.refuse(call, reason)
        return frozenset(found)

    def _why_not(self, call: cst.Call, own: set[Value]) -> Iterator[str]:
        name = self._script.code(call.func)
        if name.endswith("LBFGS"):
            yield "LBFGS computes the loss several times a step, in a closure"
        elif not own:
            yield f"it isn't clear which model {name} trains: give it model.parameters()"
        for value in own:
            if isinstance(value.site, cst.ClassDef):
                which = value.site.name.value
                yield f"the model {which} makes its own optimizer: make the optimizer outside of the model"

    def _is_made_by(self, call: Node, kind: str) -> bool:
        return isinstance(call, cst.Call) and any(value.site is call for value in self._flow.of(call, kind))

    def _is_made_behind(self, site: Node, call: cst.Call) -> bool:
        """Whether a model is made after the optimizer, for example to inspect a saved state."""
        script = self._script
        is_together = script.function(site) is script.function(call) and not script.loops(site)
        return is_together and script.order(site) > script.order(call)

    def _is_returned(self, call: cst.Call) -> bool:
        """Whether a function returns the optimizer that a call makes."""
        function = self._script.function(call)
        returns = [each for each in self._script.inside(function) if isinstance(each, cst.Return)] if function else []
        return any(
            value.site is call for each in returns[:1] if each.value for value in self._flow.of(each.value, "optimizer")
        )

    def _parameters_in(self, around: Node) -> set[Value]:
        """The models whose parameters are used within a node, also in lists and dictionaries."""
        held: set[Value] = set()
        flow = self._flow
        for node in self._script.inside(around):
            if isinstance(node, cst.BaseExpression) and not flow.is_a(node, "optimizer"):
                held |= flow.of(node, "parameters")
                for each in flow.of(node, "items") if isinstance(node, cst.Name) else ():
                    inner = (part for part in self._script.inside(each.site) if isinstance(part, cst.BaseExpression))
                    held |= {value for part in inner for value in flow.of(part, "parameters")}
        return {Value("object", value.site, value.definition) for value in held}

    # ------------------------------------------------------------------ wrapping

    def wrap(self) -> None:
        """Wrap every trained model once, before its first use."""
        edits = self._work.edits
        for call in self._parallel:
            self._leave_out(call)
        for value in sorted(self.trained, key=lambda value: self._script.order(value.site)):
            target = self._target_of(value.site)
            if target is None:
                edits.template(value.site, f"{_WRAPPER}({self._with_batch_norm('{old}')})")
                self._wrapped_at[value] = None
                continue
            statement, text = target
            use = self._wrapped_at[value] = self._first_use(statement, text)
            where = edits.after if use is statement else edits.before
            for line in [self._with_batch_norm(text), f"{_WRAPPER}({text})"]:
                if line != text:
                    edits.add(where, use, f"{text} = {line}")

    def _with_batch_norm(self, model: str) -> str:
        """The code of a model, with its batch norms converted to `SyncBatchNorm` if it may have any."""
        return f"evenstep.SyncBatchNorm.convert_sync_batchnorm({model})" if self._has_batch_norm else model

    def _target_of(self, site: Node) -> tuple[Statement, str] | None:
        """The statement that assigns a model to a name, and the name; None if there is none."""
        script = self._script
        for node in script.ancestors(site):
            if isinstance(node, cst.Arg) and self._flow.functions(script.parent(node)):  # type: ignore[arg-type]
                return None  # an argument of one of the script's functions, which may train it before the assignment
            if isinstance(node, Statement):
                return None
            if isinstance(node, cst.Assign):
                target: cst.BaseExpression = node.targets[0].target
                value = node.value
                if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
                    pairs = zip(target.elements, value.elements, strict=False)
                    parts = [(to.value, by.value) for to, by in pairs if script.is_inside(site, by.value)]
                    target, value = parts[0] if parts else (target, value)
                is_named = isinstance(target, cst.Name | cst.Attribute) and len(node.targets) == 1
                statement = script.statement(node)
                inside = isinstance(script.parent(statement), cst.IndentedBlock | cst.Module)
                is_own = any(each.site is site for each in self._flow.of(value))
                return (statement, script.code(target)) if is_named and inside and is_own else None
        return None

    def _first_use(self, statement: Statement, text: str) -> Statement:
        """The first statement that uses a model after its setup; if there is none, the statement that makes it."""
        script, behind = self._script, self._behind
        block = script.parent(statement)
        # A model that is made under an `if` may be used only after the `if`.
        while isinstance(block, cst.IndentedBlock) and isinstance(script.parent(block), _BRANCHES):
            if any(self._uses(each, text) for each in behind(statement)):
                break
            above = script.parent(block)
            while isinstance(above, cst.Else | cst.ExceptHandler) or (
                isinstance(above, cst.If) and isinstance(script.parent(above), cst.If)  # elif
            ):
                above = script.parent(above)
            statement = above  # type: ignore[assignment]
            block = script.parent(statement)
        uses = [each for each in behind(statement) if self._uses(each, text)]
        return uses[0] if uses else statement  # used in other methods only

    def _behind(self, statement: Statement) -> list[Statement]:
        body = list(self._script.parent(statement).body)  # type: ignore[union-attr]
        return body[body.index(statement) + 1 :]

    def _uses(self, statement: Statement, text: str) -> bool:
        script = self._script
        nodes = [each for each in script.inside(statement) if isinstance(each, cst.Name | cst.Attribute)]
        return any(
            script.code(each) == text and script.is_read(each) and self._is_use(each, statement) for each in nodes
        ) or any(self._reaches(each, text, set()) for each in script.inside(statement) if isinstance(each, cst.Call))

    def _reaches(self, call: cst.Call, text: str, seen: set[Node]) -> bool:
        """Whether a called function, or one that it calls, reads a model that isn't its argument."""
        script = self._script
        for function in {*self._flow.functions(call)} - seen:
            seen.add(function)
            for node in script.inside(function.body):
                is_it = (
                    isinstance(node, cst.Name | cst.Attribute) and script.code(node) == text and script.is_read(node)
                )
                if is_it and (isinstance(node, cst.Attribute) or script.scope(text, node) is not function):
                    return True
                if isinstance(node, cst.Call) and self._reaches(node, text, seen):
                    return True
        return False

    def _is_use(self, node: Node, statement: Statement) -> bool:
        """Whether a name of a model stands in a use, such as a call or an optimizer, and not only in its setup."""
        script, parent = self._script, self._script.parent(node)
        if not isinstance(parent, cst.Attribute | cst.Subscript | cst.Arg | cst.AssignTarget):
            return True
        for each in script.ancestors(node):
            match each:
                case cst.FunctionDef() | cst.ClassDef():
                    return True
                case cst.Call() if self._flow.is_a(each, "optimizer"):
                    return True
                case cst.Assign() if self._flow.is_a(each.value, "parameters"):
                    return True
                case cst.Call() if self._is_own(each) and not script.is_inside(node, each.func):
                    return True
                case cst.Assign() if isinstance(parent, cst.Arg) and script.code(parent.value) == script.code(node):
                    return script.code(each.targets[0].target) != script.code(node)  # model = torch.compile(model)
            if each is statement:
                break
        return False

    def _is_own(self, call: cst.Call) -> bool:
        return any(value.kind in ("function", "class") for value in self._flow.of(call.func))

    # ------------------------------------------------------------------ DataParallel

    def _leave_out(self, call: cst.Call) -> None:
        """Replace `DataParallel(model)` by the model; remove a statement that only did this wrapping."""
        work, script = self._work, self._script
        if not self._flow.of(call, "object") & self.trained or not call.args:
            work.note(call, "this DataParallel wraps no trained model, so it wasn't changed", mark=True)
            return
        assign, model = script.parent(call), script.code(call.args[0].value)
        if isinstance(assign, cst.Assign) and [script.code(each.target) for each in assign.targets] == [model]:
            work.remove(assign)
        work.edits.change(call, lambda new: new.args[0].value)

    # ------------------------------------------------------------------ attributes of models

    def reach_inside(self) -> None:
        """Add `.module` where the script needs the model inside its wrapper, also so that files keep their names."""
        script, edits = self._script, self._work.edits
        for node in script.nodes:
            if not isinstance(node, cst.Attribute) or node.attr.value in _MODULES_OWN:
                continue
            base, values = node.value, self._flow.of(node.value, "object")
            is_own = isinstance(base, cst.Call) or (isinstance(base, cst.Name) and base.value == "self")
            is_wrapped = any(self._is_wrapped(value, node) for value in values & self.trained)
            if is_own or not is_wrapped or self._is_part(base) or self._trains_by(node):
                continue
            # The script may use one name for wrapped models and others, such as an average of parameters.
            edits.template(base, "{old}.module" if values <= self.trained else 'getattr({old}, "module", {old})')
        for call in self._work.calls():
            text = script.code(call.func)
            reads = text in _ASKING or text.endswith(".add_graph")  # TensorBoard's `add_graph` traces the model
            name = script.qualified(call.func) or (text if reads else ".compile")
            if name.endswith((".compile", "DataParallel")):
                continue
            around = script.inside(call) if name == "torch.save" else [argument.value for argument in call.args]
            for node in filter(self._is_model, around):
                self._give_module(call, node)

    def _is_model(self, node: Node) -> bool:
        """Whether an expression is a wrapped model, with no attribute read from it and no call of it."""
        parent, held = self._script.parent(node), self._flow.of(node, "object")
        is_name = isinstance(node, cst.Name | cst.Attribute) and self._script.is_read(node)
        is_name = is_name and not isinstance(parent, cst.Attribute | cst.Call)
        is_trained = bool(held) and held <= self.trained and not self._is_part(node)
        return is_name and is_trained and all(self._is_wrapped(value, node) for value in held)

    def _give_module(self, call: cst.Call, node: Node) -> None:
        """Pass the model inside the wrapper to a call, unless the call computes a loss."""
        if call not in self._loops.flowing:
            self._work.edits.template(node, "{old}.module")
            return
        text = f"{self._script.code(call.func)} gets the wrapped model, since gradients flow through this call"
        self._work.note(call, f"{text}: other attributes are those of {self._script.code(node)}.module", mark=True)

    def _is_part(self, node: Node) -> bool:
        """Whether an expression is an attribute of a model. `.module` is added to the model's name, not to its part."""
        bases = [node.value] if isinstance(node, cst.Attribute) else []
        return any(self._flow.of(base, "object") & self.trained or self._is_part(base) for base in bases)

    def _is_wrapped(self, value: Value, node: Node) -> bool:
        script, before = self._script, self._wrapped_at.get(value)
        is_together = before is not None and script.function(before) is script.function(node)
        return not is_together or script.order(node) >= script.order(before)  # type: ignore[arg-type]

    def _trains_by(self, node: cst.Attribute) -> bool:
        """Refuse a method of a model, other than its forward pass, that a loss's gradient flows through."""
        call = self._script.parent(node)
        if call not in self._loops.flowing or not isinstance(call, cst.Call) or call.func is not node:
            return False
        text = f"{self._script.code(node)}(...) in the training loop isn't the model's forward pass"
        self._work.refuse(node, f"{text}, and only that averages gradients over ranks: let forward() call this method")
        return True

    # ------------------------------------------------------------------ backward

    def change_backward(self) -> None:
        """Weight every backward pass."""
        for each in self._loops.passes:
            if each.kind.name == SUM:
                # Gradients are averaged over ranks, so each rank's sum is multiplied by their number.
                self._work.edits.template(each.loss, f"({{old}} * {self._work.world}.world_size)")
            else:
                self._weigh(each)

    def _weigh(self, each: Pass) -> None:
        work, script = self._work, self._script
        models = work.losses.models(each.loss, self.trained) or self.trained
        ordered = sorted(models, key=lambda value: script.order(value.site))
        names = list(dict.fromkeys(self._name_at(value, each.call) for value in ordered))
        if None in names:
            work.refuse(each.call, "a model that this loss goes through has no name here: pass it to the function")
            return
        rest = "".join(f", {script.code(argument).rstrip(', ')}" for argument in each.call.args)
        given = f"{{old}}, weight={each.weight}{f', scaler={each.scaler}' if each.scaler else ''}{rest})"
        listed = ", ".join(map(str, names))
        call = f"{listed}.backward({given}" if len(names) == 1 else f"evenstep.backward([{listed}], {given}"
        config = script.module.config_for_parsing

        def change(updated: cst.Call) -> cst.BaseExpression:
            loss = updated.func.value  # type: ignore[attr-defined]
            return parse_template_expression(call, config, old=loss.with_changes(lpar=[], rpar=[]))

        work.edits.change(each.call, change)

    def _name_at(self, value: Value, node: Node) -> str | None:
        """The name by which the code around `node` can refer to a model; None if there is none."""
        script, flow = self._script, self._flow
        found = flow.name_of(frozenset({value}), node, among=self.trained)
        nodes = script.inside(script.function(node) or script.module) if found is None else []
        named = [each for each in nodes if isinstance(each, cst.Attribute | cst.Subscript)]
        return next((script.code(each) for each in named if flow.of(each, "object") == {value}), found)
