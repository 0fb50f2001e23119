"""Decides everything that is changed in a script, or why nothing is."""

from __future__ import annotations

import sys

import libcst as cst

from evenstep.tools.convert.data import Data
from evenstep.tools.convert.edits import Edits
from evenstep.tools.convert.loops import Loops
from evenstep.tools.convert.losses import Losses
from evenstep.tools.convert.models import Models
from evenstep.tools.convert.output import Output
from evenstep.tools.convert.source import Node, Script
from evenstep.tools.convert.values import BUILTINS, Flow, Values
from evenstep.tools.convert.work import Work

# Who divides training over ranks already, by the names that a script imports.
_DISTRIBUTED = {
    "evenstep": "evenstep",
    "accelerate": "accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "lightning_fabric": "Lightning Fabric",
    "deepspeed": "DeepSpeed",
    "horovod": "Horovod",
    "ignite": "Ignite",
    "fastai": "fastai",
    "keras": "Keras",
}
_TORCHS = ("torch.distributed", "torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed")
_ONE_FILE = (
    "only one file is read and changed: put the loop and what starts it in one file, or change both by hand "
    "(docs/tutorials/one-to-many.md)"
)
_PLAIN = (cst.Import, cst.ImportFrom, cst.Pass)


def already_distributed(script: Script) -> str | None:
    """Who divides a script's training over ranks already."""
    used = [script.qualified(node) or "" for node in script.nodes if isinstance(node, cst.Attribute)]
    for full in (*script.imports.values(), *used):
        root = full.split(".")[0]
        if root in _DISTRIBUTED:
            return _DISTRIBUTED[root]
        if full.startswith(_TORCHS):
            return "torch.distributed"
        if full == "transformers.Trainer":
            return "the Trainer of transformers"
    return None


def plan(script: Script, *, file: str) -> Work:
    """Decide all changes.

    Args:
        script: As it is.
        file: What the script is called.
    """
    flow = Flow(script)
    taken = script.names()
    world = next(each for each in ("world", "ranks", "evenstep_world", "world_of_ranks") if each not in taken)
    launch = f"evenstep run --nproc-per-node 2 {file}"
    work = Work(script, flow, Losses(script, flow), Edits(script, f"{world}.is_main"), world, launch)
    _validate_name(work)
    loops = Loops(work)
    if not loops.passes and not work.problems:
        work.refuse(script.module, f"no training loop: nothing in this file calls loss.backward(), and {_ONE_FILE}")
    models = Models(work, loops)
    if not models.trained and not work.problems:
        work.refuse(script.module, "it has no torch optimizer: who makes the steps isn't seen")
    if work.problems:
        return work
    data = Data(work, loops, models.trained)
    data.divide()
    models.wrap()
    models.reach_inside()
    models.change_backward()
    loops.average_metrics(data.divided)
    data.change_uses()
    output = Output(work)
    output.change()
    _make_collective(work, output)
    _keep_calls_on_all_ranks(work, models.trained)
    _vary_noise(work, loops)
    if not work.problems:
        _Joining(work).place()
    return work


def _validate_name(work: Work) -> None:
    """Refuse a script that means something else by the name that is needed."""
    uses = [node for node in work.script.nodes if isinstance(node, cst.Name) and node.value == "evenstep"]
    if any(work.script.bound("evenstep", node) for node in uses):
        work.refuse(uses[0], "the script calls something of its own evenstep: give it another name")


# ---------------------------------------------------------------------- calls that every rank makes


def _make_collective(work: Work, output: Output) -> None:
    """Have the numbers that are averaged over ranks be so on every rank, and not under a guard."""
    script, edits = work.script, work.edits
    for node, template in sorted(work.collectives.items(), key=lambda item: script.order(item[0])):
        if any(each is not node and each in work.collectives for each in script.ancestors(node)):
            continue
        guard = _outermost_guard(work, output, node)
        if guard is None:
            edits.template(node, template)
            continue
        text = template.replace("{old}", script.code(node))
        statement = script.statement(guard)
        known = [line for line in edits.before.get(statement, ()) if line.endswith(f" = {text}")]
        if known:
            name = known[0].split(" = ")[0]
        else:
            name = work.unused(f"{'mean' if 'mean(' in template else 'sum'}_{_main_name(script, node)}")
            edits.add(edits.before, statement, f"{name} = {text}")
        edits.template(node, name)


def _keep_calls_on_all_ranks(work: Work, trained: Values) -> None:
    """Have the script's functions that need all ranks called on all, though rank 0 alone prints what they return."""
    script, edits, flow = work.script, work.edits, work.flow
    users = _Joining(work).users()
    for guarded in sorted(edits.guarded, key=script.order):
        found: list[cst.Call] = []
        for node in script.inside(guarded):
            if not isinstance(node, cst.Call) or any(script.is_inside(node, each) for each in found):
                continue
            callees = {value.site for value in flow.of(node.func) if value.kind in ("function", "class")}
            is_part = isinstance(node.func, cst.Attribute) and flow.of(node.func.value) & trained
            if callees & users or (flow.of(node.func) & trained and not is_part):
                found.append(node)
        for call in found:
            is_changed = any(each in edits.replaced or each in work.collectives for each in script.inside(call))
            if is_changed or not isinstance(guarded, cst.Expr):
                text = f"every rank has to call {script.code(call.func)}, but rank 0 alone runs this"
                work.refuse(call, f"{text}: give its result a name in a line before")
                continue
            name = work.unused("result")
            edits.add(edits.before, script.statement(guarded), f"{name} = {script.code(call)}")
            edits.template(call, name)


def _outermost_guard(work: Work, output: Output, node: Node) -> Node | None:
    found: Node | None = None
    for each in work.script.ancestors(node):
        if each in work.edits.guarded:
            found = each
        if isinstance(each, cst.If) and output.asks_for_writer(each):
            found = each
        if isinstance(each, cst.FunctionDef):
            break
    return found


def _main_name(script: Script, node: Node) -> str:
    names = [each.value for each in script.inside(node) if isinstance(each, cst.Name)]
    return next((name for name in names if name not in {"self", *BUILTINS}), "value")


def _vary_noise(work: Work, loops: Loops) -> None:
    """Have ranks draw other random numbers for their samples: the script's seed is the same on all."""
    script, edits = work.script, work.edits
    drawing = [script.qualified(call.func) or "" for call in work.calls() if work.losses.draws_noise(call)]
    lines = []
    for module, full in script.imports.items():
        if full == "torch" and any(name.startswith("torch.") for name in drawing):
            lines.append(f"{module}.manual_seed({module}.initial_seed() + {work.world}.rank)")
        if full == "numpy" and any(name.startswith("numpy.") for name in drawing):
            lines.append(f"{module}.random.seed({module}.random.randint(2**31) + {work.world}.rank)")
    for loop in sorted(loops.training, key=script.order):
        outermost = _outermost(work, loop)
        for line in lines if isinstance(script.parent(outermost), cst.IndentedBlock | cst.Module) else ():
            edits.add(edits.before, outermost, f"{line}  # other noise on each rank")


def _outermost(work: Work, loop: Node) -> Node:
    """The loop around a training loop that runs once, also by way of the functions that hold it."""
    best = node = [loop, *work.script.loops(loop)][-1]
    for _ in range(4):
        function = work.script.function(node)
        calls = work.flow.calls.get(function, []) if function is not None else []
        if not calls:
            break
        loops = work.script.loops(calls[0])
        best = loops[-1] if loops else best
        node = loops[-1] if loops else calls[0]
    return best


# ---------------------------------------------------------------------- imports, and where ranks join


class _Joining:
    """Puts the import and the start of the ranks where they belong."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._script = work.script
        self._body = list(work.script.module.body)

    def place(self) -> None:
        """Add the import, and the call that joins the ranks before anything needs them."""
        first = self._first_user()
        if first is None:
            text = "nothing in this file runs the training, so there is no place where ranks could be joined, and"
            self._work.refuse(self._work.script.module, f"{text} {_ONE_FILE}")
            return
        edits, statement = self._work.edits, self._body[first]
        imports = [at for at, each in enumerate(self._body) if self._imports_torch(each)]
        above = self._body[min([first, *imports])]
        edits.before.setdefault(above, []).insert(0, "import evenstep")
        if self._is_main_guard(statement):
            assert isinstance(statement, cst.If)
            statement = statement.body.body[0] if isinstance(statement.body, cst.IndentedBlock) else statement.body  # type: ignore[assignment]
        line = f"{self._work.world} = evenstep.init(seed={self._seed()})"
        edits.before.setdefault(statement, []).insert(int(statement is above), line)
        edits.comments.setdefault(statement, []).insert(0, self._work.launch)

    def _imports_torch(self, statement: Node) -> bool:
        """Whether a statement imports torch, perhaps inside of a `try`."""
        return any(
            isinstance(each, cst.Import | cst.ImportFrom) and " torch" in self._script.code(each)
            for each in self._script.inside(statement)
        )

    def _seed(self) -> str:
        work, script = self._work, self._script
        chosen = work.seeds(are_numbers=False)
        if chosen and any((script.qualified(call.func) or "").startswith("random.rand") for call in work.calls()):
            work.note(
                chosen[0], "a seed that is drawn is the same in every run now: choose one in evenstep.init", mark=True
            )
        numbers = work.seeds(are_numbers=True)
        return script.code(numbers[0].args[0].value) if numbers else "0"

    def _is_main_guard(self, statement: Node) -> bool:
        return isinstance(statement, cst.If) and "__name__" in self._script.code(statement.test)

    def _first_user(self) -> int | None:
        """The first statement of the module that runs something which needs the ranks."""
        users = self.users()
        for index, statement in enumerate(self._body):
            if isinstance(statement, cst.FunctionDef | cst.ClassDef):
                continue
            if isinstance(statement, cst.SimpleStatementLine) and all(
                isinstance(each, _PLAIN) for each in statement.body
            ):
                continue
            if self._needs_ranks(statement, users) or self._may_draw(statement):
                return index
        return None

    def _may_draw(self, around: Node, depth: int = 0) -> bool:
        """Whether it calls what may draw random numbers, as a split of data: they have to be the same on all ranks."""
        script = self._script
        for node in script.inside(around):
            if not isinstance(node, cst.Call) or (depth == 0 and script.function(node) is not None):
                continue
            name = script.qualified(node.func)
            if name is not None and name.split(".")[0] not in sys.stdlib_module_names - {"random"}:
                return True
            by = script.bound(node.func.value, node) if isinstance(node.func, cst.Name) and depth < 4 else []
            own = [each for each in by if isinstance(each, cst.FunctionDef | cst.ClassDef)]
            if any(self._may_draw(each, depth + 1) for each in own):
                return True
        return False

    def users(self) -> set[Node]:
        """Functions and classes of the script that need the ranks when they run, also by way of others."""
        script, touched = self._script, set(self._work.edits.touched())
        users: set[Node] = set()
        for node in touched:
            for each in script.ancestors(node):
                if isinstance(each, cst.FunctionDef | cst.ClassDef):
                    users.add(each)
        names: dict[str, Node] = {
            node.name.value: node for node in script.nodes if isinstance(node, cst.FunctionDef | cst.ClassDef)
        }
        references: dict[Node, set[str]] = {
            node: {inner.value for inner in script.inside(node) if isinstance(inner, cst.Name)}
            for node in names.values()
        }
        changed = True
        while changed:
            changed = False
            for node, mentioned in references.items():
                if node not in users and any(
                    names[name] in users for name in mentioned & names.keys() if names[name] is not node
                ):
                    users.add(node)
                    changed = True
        return users

    def _needs_ranks(self, statement: Node, users: set[Node]) -> bool:
        script, touched = self._script, set(self._work.edits.touched())
        by_name = {node.name.value for node in users if isinstance(node, cst.FunctionDef | cst.ClassDef)}
        for node in script.inside(statement):
            if node in touched:
                return True
            if (
                isinstance(node, cst.Name)
                and node.value in by_name
                and isinstance(script.parent(node), cst.Call | cst.Arg)
            ):
                return True
        return False
