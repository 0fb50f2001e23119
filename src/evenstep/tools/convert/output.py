"""What one process does for all, and where each computes: printing, files, trackers, progress bars, devices."""

from __future__ import annotations

from typing import Any

import libcst as cst

from evenstep.tools.convert.edits import Change, with_argument
from evenstep.tools.convert.source import Node, Statement
from evenstep.tools.convert.work import Work

# Calls that write, by the end of their full name.
_WRITING = [
    "torch.save",
    "numpy.save",
    "numpy.savez",
    "numpy.savetxt",
    "json.dump",
    "pickle.dump",
    "yaml.dump",
    "save_image",
    "joblib.dump",
    "safetensors.torch.save_file",
    "shutil.copyfile",
    "shutil.copy",
    "shutil.rmtree",
    "shutil.move",
    "os.remove",
    "os.rename",
    "os.replace",
    "pyplot.savefig",
    "pyplot.show",
    "pyplot.plot",
    "pyplot.figure",
    "pyplot.close",
    "pprint.pprint",
    "sys.stdout.write",
    "imageio.imwrite",
    "tqdm.write",
]
_WRITING_METHODS = {"to_csv", "to_json", "to_parquet", "savefig", "write_text", "write_bytes", "save_pretrained"}
_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
_MODES = ("'w'", '"w"', "'a'", '"a"', "'wb'", '"wb"', "'x'", '"x"', "'w+'", '"w+"')
_DEVICE_FLAGS = {
    f"{each}.device" for each in ("args", "opt", "opts", "options", "cfg", "config", "hparams", "FLAGS", "conf")
}
_NEEDS_TYPE = ("autocast", "GradScaler")


class Output:
    """Changes what is printed, written and shown."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._script, self._flow = work.script, work.flow
        self._nowhere = f'{{old}} if {work.edits.main} else "/dev/null"'

    def change(self) -> None:
        """Have rank 0 alone print, write and show."""
        for call in self._work.calls():
            name = self._script.qualified(call.func) or ""
            self._change_output(call, name)
            self._change_trackers(call, name)
            self._change_device_calls(call, name)
        for node in self._script.nodes:
            self._change_devices(node)
            self._validate_writer(node)

    # ------------------------------------------------------------------ output

    def _change_output(self, call: cst.Call, name: str) -> None:
        work, script, edits = self._work, self._script, self._work.edits
        text = script.code(call.func)
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        if text == "print" and not script.bound("print", call):
            named = {argument.keyword.value for argument in call.args if argument.keyword is not None}
            if "file" in named:
                self._guard(call)
                return
            edits.template(call.func, f"{work.world}.print")
            if "flush" in named:
                edits.change(call, _without("flush"))
            return
        writes = any(name == each or name.endswith(f".{each}") for each in _WRITING)
        is_writer = isinstance(call.func, cst.Attribute) and self._flow.is_a(call.func.value, "writer")
        logs = method in _LEVELS and ("log" in text.rsplit(".", 1)[0].lower())
        if writes or is_writer or logs or (method in _WRITING_METHODS and not name.startswith("torch.utils.data")):
            self._guard(call)
        if text == "open" and call.args:
            self._open(call)
        if name == "logging.FileHandler" and call.args:
            edits.template(call.args[0].value, self._nowhere)
        for each in call.args if name == "logging.basicConfig" else ():
            if each.keyword is not None and each.keyword.value == "filename":
                edits.template(each.value, self._nowhere)
        if any(each.keyword is not None and each.keyword.value == "download" for each in call.args):
            work.note(call, "every rank downloads this, perhaps at the same time: have it there before", mark=True)
        if name in ("os.makedirs", "os.mkdir") or (method == "mkdir" and not name):
            self._make_directories(call, name)
        if name == "torch.load":
            self._load(call)

    def _guard(self, call: cst.Call) -> None:
        """Have the statement that is this call run on rank 0 only."""
        work, script = self._work, self._script
        parent = script.parent(call)
        if isinstance(parent, cst.Expr):
            if not self._is_under_writer(parent):
                work.edits.guarded.add(parent)
        elif isinstance(parent, cst.Assign) and not isinstance(parent.value, cst.Call):
            pass
        elif isinstance(script.statement(call), cst.SimpleStatementLine):
            outer = next((each for each in script.ancestors(call) if isinstance(each, cst.Expr)), None)
            if outer is not None:
                work.edits.guarded.add(outer)
            else:
                work.note(call, f"every rank calls {script.code(call.func)}", mark=True)

    def _validate_writer(self, node: Node) -> None:
        """Refuse what every rank would do with a writer, which rank 0 alone has."""
        around = [node, *self._script.ancestors(node)]
        reads = isinstance(node, cst.Attribute) and self._flow.is_a(node.value, "writer")
        opens = isinstance(node, cst.WithItem) and self._flow.is_a(node.item, "writer")
        is_alone = self._is_under_writer(node) or any(each in self._work.edits.guarded for each in around)
        if opens or (reads and not is_alone):
            text = "rank 0 alone has a writer, and every rank runs this: make the writer in a line of its own"
            self._work.refuse(node, f"{text}, and use it in statements of its own")

    def _is_under_writer(self, node: Node) -> bool:
        """Whether an `if` around it asks for a writer, which rank 0 alone has."""
        return any(isinstance(each, cst.If) and self.asks_for_writer(each) for each in self._script.ancestors(node))

    def asks_for_writer(self, node: cst.If) -> bool:
        """Whether an `if` holds where there is a writer."""
        return any(
            self._flow.is_a(each, "writer")
            for each in self._script.inside(node.test)
            if isinstance(each, cst.Name | cst.Attribute)
        )

    def _open(self, call: cst.Call) -> None:
        """A file that is opened for writing is nothing on other ranks: whatever writes to it may stay."""
        modes = [argument.value for argument in call.args[1:] if self._script.code(argument.value) in _MODES]
        if modes and call.args[0].keyword is None:
            self._work.edits.template(call.args[0].value, self._nowhere)

    def _make_directories(self, call: cst.Call, name: str) -> None:
        """Several ranks may make a directory at the same time."""
        if name == "os.mkdir":
            self._work.edits.change(call.func, lambda new: new.with_changes(attr=cst.Name("makedirs")))
        if isinstance(call.func, cst.Attribute):
            self._set(call, "exist_ok", "{old}", "True")

    def _load(self, call: cst.Call) -> None:
        """Rank 0 may still be writing what is read."""
        work, script, edits = self._work, self._script, self._work.edits
        saves = [each for each in work.calls() if script.qualified(each.func) == "torch.save"]
        named = {argument.keyword.value for argument in call.args if argument.keyword is not None}
        if "map_location" not in named and len(call.args) < 2:
            edits.change(call, with_argument("map_location", f"{work.world}.device"))
        # One that follows in the text has been written by another run.
        own = [save for save in saves if script.function(save) is script.function(call)]
        if any(script.order(save) < script.order(call) for save in own) or (saves and self._is_behind_a_loop(call)):
            edits.add(edits.before, script.statement(call), f"{work.world}.barrier()  # rank 0 has written it")

    def _is_behind_a_loop(self, call: cst.Call) -> bool:
        """Whether a loop of the same function comes first: what it calls may have saved."""
        script = self._script
        return any(
            isinstance(node, cst.For | cst.While)
            and script.function(node) is script.function(call)
            and script.order(node) < script.order(call)
            and not script.is_inside(call, node)
            for node in script.nodes
        )

    # ------------------------------------------------------------------ trackers and bars

    def _change_trackers(self, call: cst.Call, name: str) -> None:
        edits = self._work.edits
        if self._flow.is_a(call, "writer") and any(value.site is call for value in self._flow.of(call)):
            outer = self._script.parent(call)
            is_conditional = isinstance(outer, cst.IfExp) and outer.body is call
            edits.template(
                call,
                f"({{old}} if {edits.main} else None)" if is_conditional else f"{{old}} if {edits.main} else None",
            )
        elif name == "wandb.init":
            self._set(call, "mode", f'{{old}} if {edits.main} else "disabled"', f'None if {edits.main} else "disabled"')
        elif name.startswith("tqdm.") and name.rsplit(".", 1)[-1] in ("tqdm", "trange", "tqdm_notebook"):
            self._set(call, "disable", f"{{old}} or not {edits.main}", f"not {edits.main}")

    def _set(self, call: cst.Call, name: str, given: str, otherwise: str) -> None:
        """Change an argument of a call, or refuse the script where `**` may hold it.

        Args:
            given: Replaces the argument's value, which is {old}.
            otherwise: The value where there is no such argument.
        """
        argument = next((each for each in call.args if each.keyword is not None and each.keyword.value == name), None)
        unseen = self._work.unseen(call, f"{name}=...")
        if argument is not None:
            self._work.edits.template(argument.value, given)
        elif unseen is not None:
            self._work.refuse(call, unseen)
        else:
            self._work.edits.change(call, with_argument(name, otherwise))

    # ------------------------------------------------------------------ devices

    def _change_device_calls(self, call: cst.Call, name: str) -> None:
        work, script, edits = self._work, self._script, self._work.edits
        device = f"{work.world}.device"
        if name == "torch.device":
            text = script.code(call.args[0].value) if call.args else ""
            if (
                "cuda" in text
                or "device" in text
                or "gpu" in text
                or isinstance(call.args[0].value, cst.Name | cst.Attribute)
            ):
                self._choose(call, device)
            return
        if name == "torch.cuda.set_device":
            work.remove(call)
            return
        if not isinstance(call.func, cst.Attribute):
            return
        method = call.func.attr.value
        if method == "cuda" and not name:
            config = script.module.config_for_parsing

            def change(updated: Any) -> Any:
                kept = [each for each in updated.args if each.keyword is not None]
                first = cst.Arg(cst.parse_expression(device, config))
                func = updated.func.with_changes(attr=cst.Name("to"))
                return updated.with_changes(func=func, args=[first, *kept])

            edits.change(call, change)
        elif method == "to" and call.args and not name:
            argument = call.args[0].value
            if isinstance(argument, cst.Attribute) and script.code(argument) in _DEVICE_FLAGS:
                self._choose(argument, device)

    def _change_devices(self, node: Node) -> None:
        work, script, edits = self._work, self._script, self._work.edits
        if isinstance(node, cst.Assign):
            target = script.code(node.targets[0].target)
            if "CUDA_VISIBLE_DEVICES" in target:
                work.note(node, f"{target} would give every rank the same device, and was left out")
                work.remove(node)
            elif target.endswith("device") and isinstance(node.value, cst.Integer):
                edits.template(node.value, f"{work.world}.device")
        if isinstance(node, cst.IfExp) and "is_available" in script.code(node.test):
            if self._is_within(node, "torch.device"):
                return
            ends = {
                script.code(each).strip("'\"") for each in script.inside(node) if isinstance(each, cst.SimpleString)
            }
            if "cpu" in ends and not any(isinstance(each, cst.IfExp) for each in script.ancestors(node)):
                # A text where it was one: the current device is the rank's own.
                kind = ".type" if isinstance(node.body, cst.SimpleString) else ""
                self._choose(node, f"{work.world}.device{kind}")
        elif isinstance(node, cst.SimpleString) and script.code(node).strip("'\"").startswith("cuda"):
            parent = script.parent(node)
            is_argument = isinstance(parent, cst.Arg) and isinstance(script.parent(parent), cst.Call)
            if not is_argument or self._is_within(node, "torch.device"):
                return
            call = script.parent(parent)  # type: ignore[arg-type]
            assert isinstance(call, cst.Call)
            name = script.code(call.func)
            if name.endswith(_NEEDS_TYPE) or name.endswith("add_argument"):
                return
            keyword = parent.keyword.value if parent.keyword is not None else ""  # type: ignore[union-attr]
            if keyword in ("device", "map_location") or name.endswith(".to") or name == "torch.load":
                edits.template(node, f"{work.world}.device")

    def _choose(self, node: Node, device: str) -> None:
        """Compute on the rank's device, and say what chose one before."""
        self._work.edits.template(node, device)
        names = [
            each.value
            for each in self._script.inside(node)
            if isinstance(each, cst.Name) and self._script.is_read(each)
        ]
        own = [name for name in dict.fromkeys(names) if not self._script.imports.get(name, "").startswith("torch")]
        if own:
            text = f"{', '.join(own)} no longer chooses the device: evenstep run --device does"
            self._work.note(node, text, mark=True)

    def _is_within(self, node: Node, name: str) -> bool:
        for each in self._script.ancestors(node):
            if isinstance(each, cst.Call) and self._script.qualified(each.func) == name:
                return True
            if isinstance(each, Statement):
                return False
        return False


def _without(name: str) -> Change:
    """Leave an argument out of a call."""

    def change(updated: Any) -> Any:
        kept = [each for each in updated.args if each.keyword is None or each.keyword.value != name]
        if kept:
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated.with_changes(args=kept)

    return change
