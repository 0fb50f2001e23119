"""Models: which are trained, where they are wrapped, and what is called on them afterwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import libcst as cst
from libcst.helpers import parse_template_expression

from evenstep.tools.convert.edits import Work
from evenstep.tools.convert.loops import Loops, Pass
from evenstep.tools.convert.losses import SUM
from evenstep.tools.reading.tree import Node
from evenstep.tools.reading.values import Value, Values

# What the wrapper has or passes on as the module has it; names of parts begin with "module." in the wrapper.
_MODULES_OWN = {"parameters", "train", "eval", "zero_grad", "to", "cuda", "cpu", "buffers", "requires_grad_"}
_MODULES_OWN |= {"training", "module", "apply", "float", "double", "half", "bfloat16", "backward", "no_sync"}
_MODULES_OWN |= {"register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "accumulate"}
_MODULES_OWN |= {"forward", "join"}
_ASKING = {"hasattr", "getattr", "setattr", "isinstance", "type"}
_WRAPPER = "evenstep.DistributedDataParallel"
_BATCH_NORM = ("BatchNorm", "torchvision.models", "torch.hub")
# Of which no batch norm comes.
LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchvision", "evenstep", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "seaborn", "PIL", "cv2"),
    *("tqdm", "rich", "yaml", "hydra", "omegaconf", "wandb", "mlflow", "tensorboardX", "datasets", "tokenizers"),
}
_LAYER = re.compile(r"torch\.nn\.(Linear|Bilinear|Conv\dd|Embedding|LSTM|GRU|RNN)")


class Models:
    """The models that optimizers of a script train.

    Attributes:
        trained: Their values.
    """

    def __init__(self, work: Work, loops: Loops) -> None:
        self._work, self._loops = work, loops
        self._script, self._flow = work.script, work.flow
        names = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
        self._parallel = [call for call in work.calls() if work.script.qualified(call.func) in names]
        self.trained = self._find_trained()
        self._has_batch_norm = self._may_have_batch_norm()

    def _may_have_batch_norm(self) -> bool:
        """Whether a model may have a batch norm: the script names one, or what makes layers that aren't read."""
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
            if not own:  # groups that are built up in a loop: whose parameters are asked for in this function?
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
        """Whether a model is made when the optimizer is there already, as to look at what was saved."""
        script = self._script
        is_together = script.function(site) is script.function(call) and not script.loops(site)
        return is_together and script.order(site) > script.order(call)

    def _is_returned(self, call: cst.Call) -> bool:
        """Whether a method makes an optimizer for its caller, and doesn't keep it."""
        function = self._script.function(call)
        returns = [each for each in self._script.inside(function) if isinstance(each, cst.Return)] if function else []
        return any(
            value.site is call for each in returns[:1] if each.value for value in self._flow.of(each.value, "optimizer")
        )

    def _parameters_in(self, around: Node) -> set[Value]:
        """The models whose parameters are mentioned, also by way of lists and dictionaries."""
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
        """Have every trained model wrapped where it is made, so that whatever has it has its wrapper."""
        # Batch norms take their statistics over all ranks, if there may be any.
        inner = "evenstep.SyncBatchNorm.convert_sync_batchnorm({old})" if self._has_batch_norm else "{old}"
        for call in self._parallel:
            self._leave_out(call)
        for value in self.trained:
            self._work.edits.template(value.site, f"{_WRAPPER}({inner})")

    # ------------------------------------------------------------------ DataParallel

    def _leave_out(self, call: cst.Call) -> None:
        """Have a model that was made parallel be itself; a statement that did only this goes."""
        work, script = self._work, self._script
        if not self._flow.of(call, "object") & self.trained or not call.args:
            work.note(call, "this DataParallel holds no model that is trained, and was left as it is", mark=True)
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
            is_passed_on = isinstance(node, cst.Attribute) and node.attr.value in _MODULES_OWN
            if not isinstance(node, cst.Attribute | cst.Subscript) or is_passed_on:
                continue
            base, values = node.value, self._flow.objects(node.value)
            is_own = isinstance(base, cst.Name) and base.value == "self"
            if is_own or not values & self.trained or self._trains_by(node):
                continue
            # The script may use one name for wrapped models and others, such as an average of parameters.
            edits.template(base, "{old}.module" if values <= self.trained else 'getattr({old}, "module", {old})')
        for call in self._work.calls():
            text = script.code(call.func)
            reads = text in _ASKING or text.endswith(".add_graph")  # the latter of TensorBoard's writers, which traces
            name = script.qualified(call.func) or (text if reads else ".compile")
            if name.endswith((".compile", "DataParallel")):
                continue
            around = script.inside(call) if name == "torch.save" else [argument.value for argument in call.args]
            for node in filter(self._is_model, around):
                self._give_module(call, node)

    def _is_model(self, node: Node) -> bool:
        """Whether an expression is a wrapped model, and isn't asked for anything."""
        parent, held = self._script.parent(node), self._flow.objects(node)
        is_name = isinstance(node, cst.Name | cst.Attribute) and self._script.is_read(node)
        is_name = is_name and not isinstance(parent, cst.Attribute | cst.Call)
        return is_name and bool(held) and held <= self.trained

    def _give_module(self, call: cst.Call, node: Node) -> None:
        """Give what isn't the script's own the model itself: it reads or saves it, unless it computes a loss."""
        if call not in self._loops.flowing:
            self._work.edits.template(node, "{old}.module")
            return
        text = f"{self._script.code(call.func)} gets the wrapped model, since gradients flow through this call"
        self._work.note(call, f"{text}: other attributes are those of {self._script.code(node)}.module", mark=True)

    def _trains_by(self, node: Node) -> bool:
        """Refuse a method of a model, other than its forward pass, that computes what is trained on."""
        call = self._script.parent(node)
        if call not in self._loops.flowing or not isinstance(call, cst.Call) or call.func is not node:
            return False
        text = f"{self._script.code(node)}(...) in the training loop isn't the model's forward pass"
        self._work.refuse(node, f"{text}, and only that averages gradients over ranks: let forward() call this method")
        return True

    # ------------------------------------------------------------------ backward

    def change_backward(self) -> None:
        """Have every backward pass weighted."""
        for each in self._loops.passes:
            if each.kind.name == SUM:
                # The mean over ranks of so many times each rank's sum.
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
        """What a model is called at some place."""
        script, flow = self._script, self._flow
        found = flow.name_of(frozenset({value}), node, among=self.trained)
        nodes = script.inside(script.function(node) or script.module) if found is None else []
        named = [each for each in nodes if isinstance(each, cst.Attribute | cst.Subscript)]
        return next((script.code(each) for each in named if flow.of(each, "object") == {value}), found)
