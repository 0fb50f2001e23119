"""Decides everything that is changed in a script, or why nothing is."""

from __future__ import annotations

import sys

import libcst as cst

from evenstep.tools.convert.data import Data
from evenstep.tools.convert.edits import Edits, Work
from evenstep.tools.convert.kept import Kept
from evenstep.tools.convert.loops import Loops
from evenstep.tools.convert.losses import Losses
from evenstep.tools.convert.metrics import Metrics
from evenstep.tools.convert.models import Models
from evenstep.tools.convert.output import Output
from evenstep.tools.convert.values import Flow
from evenstep.tools.reading.tree import File as Script
from evenstep.tools.reading.tree import Node
from evenstep.tools.reading.values import BUILTINS, Values

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
    "transformers.Trainer": "the Trainer of transformers",
}
_TORCHS = ("torch.distributed", "torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed")
_ONE_FILE = (
    "only one file is read and changed: put the loop and what starts it in one file, or change both by hand "
    "(docs/tutorials/one-to-many.md)"
)
_DEFINITIONS = (cst.FunctionDef, cst.ClassDef)


def already_distributed(script: Script) -> str | None:
    """Who divides a script's training over ranks already."""
    used = [script.qualified(node) or "" for node in script.nodes if isinstance(node, cst.Attribute)]
    for full in (*script.imports.values(), *used):
        known = _DISTRIBUTED.get(full) or _DISTRIBUTED.get(full.split(".")[0])
        if known is not None or full.startswith(_TORCHS):
            return known or "torch.distributed"
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
    named = [node for node in script.nodes if isinstance(node, cst.Name) and node.value == "evenstep"]
    if any(script.bound("evenstep", node) for node in named):
        work.refuse(named[0], "the script calls something of its own evenstep: give it another name")
    loops = Loops(work)
    if not loops.passes and not work.problems:
        work.refuse(script.module, f"no training loop: nothing in this file calls loss.backward(), and {_ONE_FILE}")
    models = Models(work, loops)
    if not models.trained and not work.problems:
        work.refuse(script.module, "it has no torch optimizer: who makes the steps isn't seen")
    if work.problems:
        return work
    metrics = Metrics(work, loops, models.trained)
    data = Data(work, loops, metrics)
    data.divide()
    models.wrap()
    models.reach_inside()
    models.change_backward()
    metrics.average(data.divided)
    Kept(work, loops, models.trained, metrics.is_alone).remark()
    data.change_uses()
    output = Output(work)
    output.change()
    _make_collective(work, output)
    _keep_calls_on_all_ranks(work, models.trained)
    _vary_noise(work, loops)
    if not work.problems:
        _join_ranks(work)
    return work


# ---------------------------------------------------------------------- calls that every rank makes


def _make_collective(work: Work, output: Output) -> None:
    """Have the numbers that are averaged over ranks be so on every rank, and not under a guard."""
    script, edits = work.script, work.edits
    names: dict[tuple[Node, str], str] = {}
    for node, template in sorted(work.collectives.items(), key=lambda item: script.order(item[0])):
        if any(each is not node and each in work.collectives for each in script.ancestors(node)):
            continue
        edits.template(node, template)
        guard = _outermost_guard(work, output, node)
        if guard is not None:
            statement = script.statement(guard)
            known = names.get((statement, script.code(node)))
            own = [each.value for each in script.inside(node) if isinstance(each, cst.Name)]
            what = next((name for name in own if name not in {"self", *BUILTINS}), "value")
            name = known or work.unused(f"{'mean' if 'mean(' in template else 'sum'}_{what}")
            names[statement, script.code(node)] = name
            edits.move(node, None if known else statement, name)


def _keep_calls_on_all_ranks(work: Work, trained: Values) -> None:
    """Have the script's functions that need all ranks called on all, though rank 0 alone prints what they return."""
    script, edits, flow = work.script, work.edits, work.flow
    users = _users(work)
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
            edits.move(call, script.statement(guarded), work.unused("result"))


def _outermost_guard(work: Work, output: Output, node: Node) -> Node | None:
    found: Node | None = None
    for each in work.script.ancestors(node):
        if each in work.edits.guarded or (isinstance(each, cst.If) and output.asks_for_writer(each)):
            found = each
        if isinstance(each, cst.FunctionDef):
            break
    return found


def _vary_noise(work: Work, loops: Loops) -> None:
    """Have ranks draw other random numbers for their samples: the script's seed is the same on all."""
    script, edits = work.script, work.edits
    drawing = {
        (script.qualified(call.func) or "").split(".")[0] for call in work.calls() if work.losses.draws_noise(call)
    }
    seeds = {
        "torch": "{0}.manual_seed({0}.initial_seed() + {1}.rank)",
        "numpy": "{0}.random.seed({0}.random.randint(2**31) + {1}.rank)",
    }
    for loop in sorted(loops.training, key=script.order):
        outermost = _outermost(work, loop)
        for module, full in script.imports.items():
            is_block = isinstance(script.parent(outermost), cst.IndentedBlock | cst.Module)
            if full in drawing and full in seeds and is_block:
                line = seeds[full].format(module, work.world)
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


def _join_ranks(work: Work) -> None:
    """Add the import, and the call that joins the ranks before anything needs them."""
    script, edits = work.script, work.edits
    body: list[Node] = [*script.module.body]
    users, running = _users(work), [each for each in body if not isinstance(each, _DEFINITIONS)]
    first = next((each for each in running if _needs_ranks(work, each, users) or _may_draw(work, each)), None)
    if first is None:
        text = "nothing in this file runs the training, so there is no place where ranks could be joined, and"
        work.refuse(script.module, f"{text} {_ONE_FILE}")
        return
    # A module imports torch perhaps inside of a `try`.
    above = next(
        each
        for each in body
        if each is first
        or any(
            isinstance(by, cst.Import | cst.ImportFrom) and " torch" in script.code(by) for by in script.inside(each)
        )
    )
    statement = first
    if isinstance(first, cst.If) and "__name__" in script.code(first.test):
        statement = first.body.body[0] if isinstance(first.body, cst.IndentedBlock) else first.body
    edits.before.setdefault(above, []).insert(0, "import evenstep")
    line = f"{work.world} = evenstep.init(seed={_seed(work)})"
    edits.before.setdefault(statement, []).insert(int(statement is above), line)
    edits.comments.setdefault(statement, []).insert(0, work.launch)


def _seed(work: Work) -> str:
    script, numbers = work.script, work.seeds(are_numbers=True)
    drawn = [call for call in work.calls() if (script.qualified(call.func) or "").startswith("random.rand")]
    for seeding in work.seeds(are_numbers=False)[:1]:
        seed = seeding.args[0].value
        assigned = [node for node in script.nodes if isinstance(node, cst.Assign)]
        kept = {node.value for node in assigned if script.code(node.targets[0].target) == script.code(seed)}
        if any(call in kept or call in work.losses.slice(seed) for call in drawn):
            text = "a seed that is drawn is the same in every run now: choose one in evenstep.init"
            work.note(seeding, text, mark=True)
    return script.code(numbers[0].args[0].value) if numbers else "0"


def _may_draw(work: Work, around: Node, depth: int = 0) -> bool:
    """Whether it calls what may draw random numbers, as a split of data: they have to be the same on all ranks."""
    script = work.script
    for node in script.inside(around):
        if not isinstance(node, cst.Call) or (depth == 0 and script.function(node) is not None):
            continue
        name = script.qualified(node.func)
        if name is not None and name.split(".")[0] not in sys.stdlib_module_names - {"random"}:
            return True
        by = script.bound(node.func.value, node) if isinstance(node.func, cst.Name) and depth < 4 else []
        if any(_may_draw(work, each, depth + 1) for each in by if isinstance(each, _DEFINITIONS)):
            return True
    return False


def _users(work: Work) -> set[Node]:
    """Functions and classes of the script that need the ranks when they run, also by way of others."""
    script = work.script
    around = [each for node in work.edits.touched() for each in script.ancestors(node)]
    users: set[Node] = {each for each in around if isinstance(each, _DEFINITIONS)}
    defined = {node.name.value: node for node in script.nodes if isinstance(node, _DEFINITIONS)}
    names = {
        node: {inner.value for inner in script.inside(node) if isinstance(inner, cst.Name)} - {name}
        for name, node in defined.items()
    }
    found = set(users)
    while found:  # who mentions one that was found last
        last = {each.name.value for each in found if isinstance(each, _DEFINITIONS)}
        found = {node for node in names if node not in users and names[node] & last}
        users |= found
    return users


def _needs_ranks(work: Work, statement: Node, users: set[Node]) -> bool:
    script, touched = work.script, set(work.edits.touched())
    names = {node.name.value for node in users if isinstance(node, _DEFINITIONS)}
    return any(
        node in touched
        or (isinstance(node, cst.Name) and node.value in names and isinstance(script.parent(node), cst.Call | cst.Arg))
        for node in script.inside(statement)
    )
