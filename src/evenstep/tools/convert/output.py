"""Restricts printing, files, trackers and progress bars to rank 0, and changes devices to the rank's own."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from evenstep.tools.convert.edits import Work, with_argument
from evenstep.tools.reading.tree import Node

# Functions that write, by the end of their full name, and methods that write.
_WRITING = (
    *("torch.save", "numpy.save", "numpy.savez", "numpy.savetxt", "json.dump", "pickle.dump", "yaml.dump"),
    *("save_image", "joblib.dump", "safetensors.torch.save_file", "imageio.imwrite", "tqdm.write", "pprint.pprint"),
    *("shutil.copyfile", "shutil.copy", "shutil.rmtree", "shutil.move", "os.remove", "os.rename", "os.replace"),
    *("pyplot.savefig", "pyplot.show", "pyplot.plot", "pyplot.figure", "pyplot.close", "sys.stdout.write"),
)
_WRITING_METHODS = {"to_csv", "to_json", "to_parquet", "savefig", "write_text", "write_bytes", "save_pretrained"}
_SHOWING = re.compile("progress_?bar|plot|print", re.IGNORECASE)  # functions of other files that may show something
_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
_MODES = {"w", "a", "wb", "x", "w+"}
_PLAIN = re.compile(r"""["']?(cpu|meta)["']?""")  # devices that are no GPU
_DEVICE = re.compile(r"cuda(:\d+)?$|(args|opts?|options|cfg|config|hparams|FLAGS|conf)\.device$")  # may be a GPU


class Output:
    """Changes a script's output, files, trackers and devices."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._script, self._flow, self._edits = work.script, work.flow, work.edits
        self._nowhere = f'{{old}} if {work.edits.main} else "/dev/null"'
        self._device = f"{work.world}.device"

    def change(self) -> None:
        """Let rank 0 alone print, write and show, and each rank use its own device."""
        for call in self._work.calls():
            name = self._script.qualified(call.func) or ""
            self._change_output(call, name)
            self._change_files(call, name)
            self._change_trackers(call, name)
        for node in self._script.nodes:
            self._change_device(node)
            self._validate_writer(node)

    # ------------------------------------------------------------------ output

    def _change_output(self, call: cst.Call, name: str) -> None:
        script, short = self._script, self._work.short(call)
        if script.code(call.func) == "print" and not name and not script.bound("print", call):
            named = {argument.keyword.value for argument in call.args if argument.keyword is not None}
            if "file" in named:
                self._guard(call)
            else:
                self._edits.template(call.func, f"{self._work.world}.print")
                self._edits.change(call, _without_flush)
            return
        base = call.func.value if isinstance(call.func, cst.Attribute) else None
        writes = any(f".{name}".endswith(f".{each}") for each in _WRITING) and not self._is_private(call)
        is_writer = base is not None and self._flow.is_a(base, "writer")
        logs = base is not None and short in _LEVELS and "log" in script.code(base).lower()
        is_method = short in _WRITING_METHODS and base is not None and not name.startswith("torch.utils.data")
        # A function of another file, which doesn't know the ranks.
        shows = bool(name) and _SHOWING.search(short) and isinstance(script.parent(call), cst.Expr)
        if writes or is_writer or logs or is_method or shows:
            self._guard(call)

    def _is_private(self, call: cst.Call) -> bool:
        """Whether a file is in a temporary directory: each rank makes its own and may write there."""
        nodes = {each for argument in call.args for each in self._work.losses.slice(argument.value)}
        names = [self._script.qualified(each.func) or "" for each in nodes if isinstance(each, cst.Call)]
        return any(each.startswith("tempfile.") and each != "tempfile.gettempdir" for each in names)

    def _guard(self, call: cst.Call) -> None:
        """Guard a statement that is only this call, so that rank 0 alone runs it."""
        script, outer = self._script, self._script.parent(call)
        if isinstance(outer, cst.Expr):
            if len(getattr(script.parent(outer), "body", ())) > 1:
                self._work.refuse(call, f"rank 0 alone calls {script.code(call.func)}: give it a line of its own")
            elif not self._is_under_writer(outer):
                self._edits.guarded.add(outer)
        elif not isinstance(outer, cst.Assign) and isinstance(script.statement(call), cst.SimpleStatementLine):
            self._work.note(call, f"every rank calls {script.code(call.func)}", mark=True)

    def _validate_writer(self, node: Node) -> None:
        """Refuse unguarded uses of a tracker's writer, because only rank 0 has one."""
        around = {node, *self._script.ancestors(node)}
        reads = isinstance(node, cst.Attribute) and self._flow.is_a(node.value, "writer")
        opens = isinstance(node, cst.WithItem) and self._flow.is_a(node.item, "writer")
        text = "rank 0 alone has a writer, and every rank runs this"
        if opens:
            self._work.refuse(node, f"{text}: make the writer in a line of its own")
        elif reads and not self._is_under_writer(node) and not around & self._edits.guarded:
            self._work.refuse(node, f"{text}: {self._script.code(node)} has to be a statement of its own")

    def _is_under_writer(self, node: Node) -> bool:
        """Whether an `if` around a node tests for a writer, which only rank 0 has."""
        return any(isinstance(each, cst.If) and self.asks_for_writer(each) for each in self._script.ancestors(node))

    def asks_for_writer(self, node: cst.If) -> bool:
        """Whether the condition of an `if` names a writer."""
        names = [each for each in self._script.inside(node.test) if isinstance(each, cst.Name | cst.Attribute)]
        return any(self._flow.is_a(each, "writer") for each in names)

    # ------------------------------------------------------------------ files

    def _change_files(self, call: cst.Call, name: str) -> None:
        script, edits, args = self._script, self._edits, call.args
        named = {each.keyword.value: each for each in args if each.keyword is not None}
        modes = {script.code(each.value).strip("'\"") for each in args[1:]}
        # Other ranks open /dev/null instead of a file for writing, so the code that writes to it can stay.
        if args and (name == "logging.FileHandler" or (script.code(call.func) == "open" and modes & _MODES)):
            edits.template(args[0].value, self._nowhere)
        if name == "logging.basicConfig" and "filename" in named:
            edits.template(named["filename"].value, self._nowhere)
        if "download" in named:
            text = "every rank downloads this, perhaps at the same time: download it before the run"
            self._work.note(call, text, mark=True)
        if name in ("os.makedirs", "os.mkdir") or (not name and self._work.short(call) == "mkdir"):
            # Several ranks may make a directory at the same time.
            if name == "os.mkdir":
                edits.change(call.func, lambda new: new.with_changes(attr=cst.Name("makedirs")))
            if isinstance(call.func, cst.Attribute):
                self._set(call, "exist_ok", "{old}", "True")
        if name == "torch.load":
            if "map_location" not in named and len(args) - len(named) < 2:
                edits.change(call, with_argument("map_location", self._device))
            if self._is_saved_before(call) and not self._is_private(call):
                edits.add(
                    edits.before, script.statement(call), f"{self._work.world}.barrier()  # rank 0 has written it"
                )

    def _is_saved_before(self, load: cst.Call) -> bool:
        """Whether rank 0 may still be writing the file that a `torch.load` reads.

        It may if a save, or a loop that may call one, stands before the load. A save that stands after the load wrote
        the file in an earlier run.
        """
        script = self._script
        saves = [each for each in self._work.calls() if script.qualified(each.func) == "torch.save"]
        loops = [each for each in script.nodes if isinstance(each, cst.For | cst.While) and saves]  # may call it
        return any(
            script.function(each) is script.function(load)
            and script.order(each) < script.order(load)
            and not (each in loops and script.is_inside(load, each))
            for each in (*saves, *loops)
        )

    # ------------------------------------------------------------------ trackers and bars

    def _change_trackers(self, call: cst.Call, name: str) -> None:
        main = self._edits.main
        if any(value.site is call for value in self._flow.of(call, "writer")):
            outer = self._script.parent(call)
            is_conditional = isinstance(outer, cst.IfExp) and outer.body is call
            text = f"{{old}} if {main} else None"
            self._edits.template(call, f"({text})" if is_conditional else text)
        elif name == "wandb.init":
            self._set(call, "mode", f'{{old}} if {main} else "disabled"', f'None if {main} else "disabled"')
        elif name.rsplit(".", 1)[-1] in ("tqdm", "trange", "tqdm_notebook"):
            self._set(call, "disable", f"{{old}} or not {main}", f"not {main}")

    def _set(self, call: cst.Call, name: str, given: str, otherwise: str) -> None:
        """Change an argument of a call, or refuse the script where `**` may hold it.

        Args:
            given: The template that replaces the argument's value, with {old} for the value.
            otherwise: The value if the call has no such argument.
        """
        argument = next((each for each in call.args if each.keyword is not None and each.keyword.value == name), None)
        unseen = self._work.unseen(call, f"{name}=...", [name])
        if argument is not None:
            self._edits.template(argument.value, given)
        elif unseen is not None:
            self._work.refuse(call, unseen)
        else:
            self._edits.change(call, with_argument(name, otherwise))

    # ------------------------------------------------------------------ devices

    def _change_device(self, node: Node) -> None:
        """Replace an expression that chooses a device by the rank's own device."""
        work, script, edits = self._work, self._script, self._edits
        match node:
            case cst.Assign(targets=[cst.AssignTarget(target=assigned)]):
                text = script.code(assigned)
                if "CUDA_VISIBLE_DEVICES" in text:
                    work.note(node, f"{text} would give every rank the same device, and was left out")
                    work.remove(node)
                elif text.endswith("device") and isinstance(node.value, cst.Integer):
                    self._choose(node.value)
            case cst.Call() if script.qualified(node.func) == "torch.cuda.set_device":
                work.remove(node)
            case cst.Call(func=cst.Attribute(attr=cst.Name(value="cuda"))) if script.qualified(node.func) is None:
                edits.change(node, self._to_device)
            case cst.Call() if script.qualified(node.func) == "torch.device":
                if not _PLAIN.fullmatch(script.code(node.args[0].value) if node.args else "cpu"):
                    self._choose(node)
            case cst.IfExp(body=body, orelse=orelse) if "is_available" in script.code(node.test):
                if "cpu" in script.code(body) + script.code(orelse):
                    # A string stays a string: `.type` suffices, because the current device is the rank's own.
                    self._choose(node, ".type" if isinstance(body, cst.SimpleString) else "")
            case cst.Arg(value=chosen, keyword=keyword):
                call = script.parent(node)
                called = script.code(call.func) if isinstance(call, cst.Call) else ""
                is_device = script.code(keyword) in ("device", "map_location") if keyword is not None else False
                text = script.code(chosen).strip("'\"")
                if (is_device or called.endswith((".to", "torch.load"))) and _DEVICE.match(text):
                    self._choose(chosen)

    def _to_device(self, updated: Any) -> Any:
        kept = [each for each in updated.args if each.keyword is not None]
        first = cst.Arg(cst.parse_expression(self._device))
        return updated.with_changes(func=updated.func.with_changes(attr=cst.Name("to")), args=[first, *kept])

    def _choose(self, node: Node, part: str = "") -> None:
        """Replace an expression by the rank's device, and remark on the name that chose the device before."""
        script = self._script
        self._edits.template(node, self._device + part)
        read = [each for each in script.inside(node) if isinstance(each, cst.Name | cst.Attribute)]
        named = [script.code(each) for each in read if script.is_read(each)]
        own = [each for each in named if not script.imports.get(each.partition(".")[0], "").startswith("torch")]
        if own:
            text = f"{own[0]} no longer chooses the device: evenstep run --device does"
            self._work.note(node, text, mark=True)


def _without_flush(updated: Any) -> Any:
    kept = [each for each in updated.args if each.keyword is None or each.keyword.value != "flush"]
    if kept and len(kept) < len(updated.args):
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return updated.with_changes(args=kept)
