"""Models: which are trained, where they are wrapped, and what is called on them afterwards."""

from __future__ import annotations

import sys

import libcst as cst
from libcst.helpers import parse_template_expression

from evenstep.tools.convert.loops import Loops, Pass
from evenstep.tools.convert.losses import SUM
from evenstep.tools.convert.source import Node, Statement
from evenstep.tools.convert.values import Value, Values
from evenstep.tools.convert.work import Work

# What the wrapper has or passes on as the module has it; names of parts begin with "module." in the wrapper.
_MODULES_OWN = {
    "parameters",
    "train",
    "eval",
    "zero_grad",
    "to",
    "cuda",
    "cpu",
    "buffers",
    "requires_grad_",
    "training",
}
_MODULES_OWN |= {"module", "apply", "float", "double", "half", "bfloat16", "backward", "no_sync", "forward", "join"}
_MODULES_OWN |= {"register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "accumulate"}
_ASKING = {"hasattr", "getattr", "setattr", "isinstance", "type"}
# What may be done to a model before it is wrapped; parts of it may be replaced, too.
_SETTING_UP = {"print", "summary", "len", "sum", "str", "repr", "isinstance", "hasattr", "info", "debug", "getattr"}
_SETTING_UP_ITSELF = {"to", "cuda", "float", "double", "requires_grad_", "fill_", "zero_", "copy_", "eval"}
_WRAPPER = "evenstep.DistributedDataParallel"
_BATCH_NORM = ("BatchNorm", "torchvision.models", "torch.hub")
_WITHOUT_LAYERS = sys.stdlib_module_names | {
    *("torch", "torchvision", "evenstep", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "seaborn", "PIL", "cv2"),
    *("tqdm", "rich", "yaml", "hydra", "omegaconf", "wandb", "mlflow", "tensorboardX", "datasets", "tokenizers"),
}


class Models:
    """The models that optimizers of a script train.

    Attributes:
        trained: Their values.
    """

    def __init__(self, work: Work, loops: Loops) -> None:
        self._work, self._loops = work, loops
        self._script, self._flow = work.script, work.flow
        self._wrapped_at: dict[Value, Node | None] = {}  # the statement that the wrapper stands before, by model
        self._parallel = [call for call in work.calls() if self._is_data_parallel(call)]
        self.trained = self._find_trained()
        self._has_batch_norm = self._may_have_batch_norm()

    def _may_have_batch_norm(self) -> bool:
        """Whether a model may have a batch norm: the script names one, or what makes layers that aren't read."""
        script = self._script
        named = {script.qualified(node) or "" for node in script.nodes if isinstance(node, cst.Name | cst.Attribute)}
        return (
            script.has_stars
            or any(each.split(".")[0] not in _WITHOUT_LAYERS for each in script.imports.values())
            or any(name in each for each in named for name in _BATCH_NORM)
        )

    def _find_trained(self) -> Values:
        found: set[Value] = set()
        for call in self._work.calls():
            if not self._flow.is_a(call, "optimizer") or not any(v.site is call for v in self._flow.of(call)):
                continue
            own = self._parameters_in(call)
            if not own:  # groups that are built up in a loop: whose parameters are asked for in this function?
                function = self._script.function(call)
                own = self._parameters_in(self._script.module if function is None else function)
                own = own if len(own) == 1 else set()
            own = {value for value in own if not self._is_made_behind(value.site, call)} or own
            if self._is_returned(call):  # model.configure_optimizers(...)
                own = {value for value in own if not isinstance(value.site, cst.ClassDef)} or own
            found |= own
            self._validate_optimizer(call, own)
        return frozenset(found)

    def _is_made_behind(self, site: Node, call: cst.Call) -> bool:
        """Whether a model is made when the optimizer is there already, as to look at what was saved."""
        script = self._script
        is_together = script.function(site) is script.function(call) and not script.loops(site)
        return is_together and script.order(site) > script.order(call)

    def _is_returned(self, call: cst.Call) -> bool:
        """Whether a method makes an optimizer for its caller, and doesn't keep it."""
        function = self._script.function(call)
        if function is None:
            return False
        for node in self._script.inside(function):
            if isinstance(node, cst.Return) and node.value is not None:
                return any(value.site is call for value in self._flow.of(node.value, "optimizer"))
        return False

    def _parameters_in(self, around: Node) -> set[Value]:
        """The models whose parameters are mentioned, also by way of lists and dictionaries."""
        own: set[Value] = set()
        for node in self._script.inside(around):
            if isinstance(node, cst.BaseExpression) and not self._flow.is_a(node, "optimizer"):
                held = set(self._flow.of(node, "parameters"))
                for each in self._flow.of(node, "items") if isinstance(node, cst.Name) else ():
                    inner = (part for part in self._script.inside(each.site) if isinstance(part, cst.BaseExpression))
                    held |= {value for part in inner for value in self._flow.of(part, "parameters")}
                own |= {Value("object", value.site, value.definition) for value in held}
        return own

    def _validate_optimizer(self, call: cst.Call, own: set[Value]) -> None:
        work, script = self._work, self._script
        name = script.code(call.func)
        if name.endswith("LBFGS"):
            work.refuse(call, "LBFGS computes the loss several times a step, in a closure")
        elif not own:
            work.refuse(call, f"it isn't clear which model {name} trains: give it model.parameters()")
        for value in own:
            if isinstance(value.site, cst.ClassDef):
                which = value.site.name.value
                work.refuse(
                    call, f"{which} makes its own optimizer: the loop has to hold the model, and not be a part of it"
                )

    # ------------------------------------------------------------------ wrapping

    def wrap(self) -> None:
        """Have every trained model wrapped, once, before it is first used."""
        for call in self._parallel:
            self._leave_out(call)
        for value in sorted(self.trained, key=lambda value: self._script.order(value.site)):
            if isinstance(value.site, cst.Call):
                self._wrap(value)

    def _wrap(self, value: Value) -> None:
        edits = self._work.edits
        target = self._target_of(value.site)
        if target is None:
            edits.template(value.site, f"{_WRAPPER}({self._with_batch_norm('{old}')})")
            self._wrapped_at[value] = None
            return
        statement, text = target
        use = self._first_use(statement, text)
        for line in self._wrapping(text):
            edits.add(edits.after if use is statement else edits.before, use, line)
        self._wrapped_at[value] = use

    def _wrapping(self, text: str) -> list[str]:
        """The lines that wrap what has a name."""
        lines = [f"{text} = {self._with_batch_norm(text)}"] if self._has_batch_norm else []
        return [*lines, f"{text} = {_WRAPPER}({text})"]

    def _with_batch_norm(self, model: str) -> str:
        """A model whose batch norms take their statistics over all ranks, if it may have any."""
        return f"evenstep.SyncBatchNorm.convert_sync_batchnorm({model})" if self._has_batch_norm else model

    def _target_of(self, site: Node) -> tuple[Statement, str] | None:
        """The statement that gives a model its name, and the name."""
        script = self._script
        for node in script.ancestors(site):
            if isinstance(node, cst.Arg) and self._flow.functions(script.parent(node)):  # type: ignore[arg-type]
                return None  # a function of the script gets it, and may train it before it returns it
            if isinstance(node, cst.Assign) and len(node.targets) == 1:
                target: cst.BaseExpression = node.targets[0].target
                value = node.value
                if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
                    for each, part in zip(target.elements, value.elements, strict=False):
                        if script.is_inside(site, part.value):
                            target, value = each.value, part.value
                            break
                if isinstance(target, cst.Name | cst.Attribute) and any(v.site is site for v in self._flow.of(value)):
                    statement = script.statement(node)
                    inside = isinstance(script.parent(statement), cst.IndentedBlock | cst.Module)
                    return (statement, script.code(target)) if inside else None
                return None
            if isinstance(node, Statement):
                return None
        return None

    def _first_use(self, statement: Statement, text: str) -> Statement:
        """The first statement behind a model's making that uses it, other than to set it up; else its making."""
        script = self._script
        block = script.parent(statement)
        # Made under an `if`, it is used behind that.
        while (
            isinstance(block, cst.IndentedBlock)
            and isinstance(script.parent(block), cst.If | cst.Else | cst.Try | cst.ExceptHandler)
            and not self._is_used_inside(block, statement, text)
        ):
            above = script.parent(block)
            while isinstance(above, cst.Else | cst.ExceptHandler) or (
                isinstance(above, cst.If) and isinstance(script.parent(above), cst.If)
            ):
                above = script.parent(above)  # elif
            statement = above  # type: ignore[assignment]
            block = script.parent(statement)
        body = list(block.body)  # type: ignore[union-attr]
        following = body[body.index(statement) + 1 :]
        for each in following:
            if self._uses(each, text):
                return each  # type: ignore[no-any-return]
        return statement  # used in other methods only

    def _is_used_inside(self, block: cst.IndentedBlock, statement: Node, text: str) -> bool:
        body = list(block.body)
        return any(self._uses(each, text) for each in body[body.index(statement) + 1 :])  # type: ignore[arg-type]

    def _uses(self, statement: Node, text: str) -> bool:
        script = self._script
        for node in script.inside(statement):
            if not isinstance(node, cst.Name | cst.Attribute) or script.code(node) != text:
                continue
            if script.is_read(node) and not self._sets_up(node):
                return True
        return False

    def _sets_up(self, node: Node) -> bool:
        """Whether a use of a model leaves it as good as unused."""
        script = self._script
        for each in script.ancestors(node):
            if isinstance(each, cst.Call):
                name = script.code(each.func)
                short = name.rsplit(".", 1)[-1]
                if self._flow.is_a(each, "optimizer") and any(v.site is each for v in self._flow.of(each)):
                    return False
                if short in _SETTING_UP or name.startswith(("torch.nn.init.", "nn.init.", "init.")):
                    return True
                if short in ("load_state_dict", "apply", "compile") and script.is_inside(node, each.func):
                    return True
            if isinstance(each, cst.AssignTarget):  # model.fc = ..., and model = model.to(device)
                return True
            if isinstance(each, cst.Assign) and script.code(each.targets[0].target) == script.code(node):
                return isinstance(each.value, cst.Call | cst.Name)
            if isinstance(each, cst.For):
                return "parameters" in script.code(each.iter) and not any(
                    self._flow.is_a(inner, "optimizer") for inner in script.inside(each) if isinstance(inner, cst.Call)
                )
            if isinstance(each, cst.FunctionDef | cst.ClassDef | cst.With | cst.While):
                return False
            if isinstance(each, cst.SimpleStatementLine):
                if len(each.body) == 1 and isinstance(each.body[0], cst.Expr):
                    method = each.body[0].value
                    name = script.code(method.func).rsplit(".", 1)[-1] if isinstance(method, cst.Call) else ""
                    return name in _SETTING_UP_ITSELF
                # fc_inputs = model.fc.in_features
                return isinstance(script.parent(node), cst.Attribute) and not self._is_called(node)
        return False

    def _is_called(self, node: Node) -> bool:
        above = node
        for each in self._script.ancestors(node):
            if isinstance(each, cst.Call):
                return each.func is above
            if not isinstance(each, cst.Attribute):
                return False
            above = each
        return False

    # ------------------------------------------------------------------ DataParallel

    def _is_data_parallel(self, call: cst.Call) -> bool:
        return self._script.qualified(call.func) in ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")

    def _leave_out(self, call: cst.Call) -> None:
        """Have a model that was made parallel be itself; a statement that did only this goes."""
        work, script = self._work, self._script
        if not self._flow.of(call, "object") & self.trained or not call.args:
            work.note(call, "this DataParallel holds no model that is trained, and was left", mark=True)
            return
        assign, model = script.parent(call), script.code(call.args[0].value)
        if isinstance(assign, cst.Assign) and [script.code(each.target) for each in assign.targets] == [model]:
            work.remove(assign)
        work.edits.change(call, lambda new: new.args[0].value)

    # ------------------------------------------------------------------ what is called on a model

    def reach_inside(self) -> None:
        """Reach what only the module itself has through its wrapper; files keep the names of a plain model."""
        script, edits = self._script, self._work.edits
        for node in script.nodes:
            if not isinstance(node, cst.Attribute) or node.attr.value in _MODULES_OWN:
                continue
            values = self._flow.of(node.value, "object")
            held = values & self.trained
            if (
                not held
                or self._is_part(node.value)
                or (isinstance(node.value, cst.Name) and node.value.value == "self")
            ):
                continue
            if not any(self._is_wrapped(value, node) for value in held):
                continue
            if isinstance(node.value, cst.Call):
                continue
            if self._trains_by(node):
                continue
            # The script may use one name for wrapped models and others, such as an average of parameters.
            inner = "{old}.module" if values <= self.trained else 'getattr({old}, "module", {old})'
            edits.template(node.value, inner)
        for call in self._work.calls():
            name = script.qualified(call.func) or (
                script.code(call.func) if script.code(call.func) in _ASKING else None
            )
            if name is None or name.endswith((".compile", "DataParallel")):
                continue
            around = call.args if name == "torch.save" else [argument.value for argument in call.args]
            for node in [each for part in around for each in (script.inside(part) if name == "torch.save" else [part])]:
                if self._is_model(node):
                    self._give_module(call, node)

    def _is_model(self, node: Node) -> bool:
        """Whether an expression is a wrapped model, and isn't asked for anything."""
        parent, held = self._script.parent(node), self._flow.of(node, "object")
        is_name = isinstance(node, cst.Name | cst.Attribute) and self._script.is_read(node)
        is_name = is_name and not isinstance(parent, cst.Attribute | cst.Call)
        is_trained = bool(held) and held <= self.trained and not self._is_part(node)
        return is_name and is_trained and all(self._is_wrapped(value, node) for value in held)

    def _give_module(self, call: cst.Call, node: Node) -> None:
        """Give what isn't the script's own the model itself: it reads or saves it, unless it computes a loss."""
        if call not in self._loops.flowing:
            self._work.edits.template(node, "{old}.module")
            return
        function, model = self._script.code(call.func), self._script.code(node)
        text = (
            f"{function} gets the wrapped model, as gradients flow through it: what else it reads is {model}.module's"
        )
        self._work.note(call, text, mark=True)

    def _is_part(self, node: Node) -> bool:
        """Whether an expression names a part of a model: the wrapper is passed where the model itself is named."""
        while isinstance(node, cst.Attribute):
            if self._flow.of(node.value, "object") & self.trained:
                return True
            node = node.value
        return False

    def _is_wrapped(self, value: Value, node: Node) -> bool:
        script = self._script
        before = self._wrapped_at.get(value)
        if before is None:
            return True
        if script.function(before) is script.function(node):
            return script.order(node) >= script.order(before)
        return True

    def _trains_by(self, node: cst.Attribute) -> bool:
        """Refuse a method of a model, other than its forward pass, that computes what is trained on."""
        call = self._script.parent(node)
        if call not in self._loops.flowing or not isinstance(call, cst.Call) or call.func is not node:
            return False
        self._work.refuse(
            node,
            f"{self._script.code(node)}(...) in the training loop isn't the model's forward pass, which averages "
            f"gradients over ranks: let forward() call it",
        )
        return True

    # ------------------------------------------------------------------ backward

    def change_backward(self) -> None:
        """Have every backward pass weighted."""
        for each in self._loops.passes:
            self._change_pass(each)

    def _change_pass(self, each: Pass) -> None:
        work, script, edits = self._work, self._script, self._work.edits
        if each.kind.name == SUM:
            # The mean over ranks of so many times each rank's sum.
            edits.template(each.loss, f"({{old}} * {work.world}.world_size)")
            return
        models = work.losses.models(each.loss, self.trained) or self.trained
        ordered = sorted(models, key=lambda value: script.order(value.site))
        names = list(dict.fromkeys(self._name_at(value, each.call) for value in ordered))
        if None in names:
            work.refuse(each.call, "a model that this loss goes through has no name here: pass it to the function")
            return
        rest = "".join(f", {script.code(argument)}" for argument in _without_commas(each.call.args))
        scaler = f", scaler={each.scaler}" if each.scaler else ""
        if len(names) == 1:
            call = f"{names[0]}.backward({{old}}, weight={each.weight}{scaler}{rest})"
        else:
            listed = ", ".join(str(name) for name in names)
            call = f"evenstep.backward([{listed}], {{old}}, weight={each.weight}{scaler}{rest})"
        config = script.module.config_for_parsing

        def change(updated: cst.CSTNode) -> cst.CSTNode:
            inner = updated.func.value  # type: ignore[attr-defined]
            if isinstance(inner, cst.BinaryOperation | cst.Attribute | cst.Call | cst.Name):
                inner = inner.with_changes(lpar=[], rpar=[])
            return parse_template_expression(call, config, old=inner)

        edits.change(each.call, change)

    def _name_at(self, value: Value, node: Node) -> str | None:
        """What a model is called at some place."""
        script, flow = self._script, self._flow
        function = script.function(node)
        found = flow.name_of(frozenset({value}), node, among=self.trained)
        if found is not None:
            return found
        for each in script.inside(function if function is not None else script.module):
            if isinstance(each, cst.Attribute | cst.Subscript) and flow.of(each, "object") == {value}:
                return script.code(each)
        return None


def _without_commas(arguments: object) -> list[cst.Arg]:
    return [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in arguments]  # type: ignore[attr-defined]
