"""Decides all changes of a script, or why it can't be converted."""

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

# By imported name, the library that already distributes the training.
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
_ONE_FILE = "convert reads one file: put the loop and what starts it into one file, or change both by hand"
_DEFINITIONS = (cst.FunctionDef, cst.ClassDef)


def already_distributed(script: Script) -> str | None:
    """The library that already distributes a script's training over ranks; None if there is none."""
    used = [script.qualified(node) or "" for node in script.nodes if isinstance(node, cst.Attribute)]
    for full in (*script.imports.values(), *used):
        known = _DISTRIBUTED.get(full) or _DISTRIBUTED.get(full.split(".")[0])
        if known is not None or full.startswith(_TORCHS):
            return known or "torch.distributed"
    return None


def plan(script: Script, *, file: str) -> Work:
    """Decide all changes.

    Args:
        script: The original script.
        file: The name of its file.
    """
    flow = Flow(script)
    taken = script.names()
    world = next(each for each in ("world", "ranks", "evenstep_world", "world_of_ranks") if each not in taken)
    launch = f"evenstep run --nproc-per-node 2 {file}"
    work = Work(script, flow, Losses(script, flow), Edits(script, f"{world}.is_main"), world, launch)
    named = [node for node in script.nodes if isinstance(node, cst.Name) and node.value == "evenstep"]
    if any(script.bound("evenstep", node) for node in named):
        work.refuse(named[0], "the script has something of its own that is named evenstep: give it another name")
    loops = Loops(work)
    if not loops.passes and not work.problems:
        work.refuse(script.module, f"no training loop: nothing in this file calls loss.backward(), and {_ONE_FILE}")
    models = Models(work, loops)
    if not models.trained and not work.problems:
        work.refuse(script.module, "no torch optimizer: convert doesn't see what makes the steps")
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
    _refuse_guarded_calls(work, models.trained)
    _vary_noise(work, loops)
    if not work.problems:
        _join_ranks(work)
        _remark_on_drawn_seeds(work)
    return work


# ---------------------------------------------------------------------- calls that every rank makes


def _make_collective(work: Work, output: Output) -> None:
    """Replace numbers by their collectives, and move those under a guard before it, so that every rank calls them."""
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


def _refuse_guarded_calls(work: Work, trained: Values) -> None:
    """Refuse guarded calls that need all ranks: rank 0 alone would wait for the others for ever."""
    script, flow, users = work.script, work.flow, _users(work)
    for node in (each for guarded in work.edits.guarded for each in script.inside(guarded)):
        if isinstance(node, cst.Call):
            is_part = isinstance(node.func, cst.Attribute) and flow.of(node.func.value) & trained
            called = {each.name.value for each in work.losses.called(node, forwards=False)}
            if called & users or (flow.of(node.func) & trained and not is_part):
                text = f"rank 0 alone runs this, and {script.code(node.func)}(...) needs all ranks"
                work.refuse(node, f"{text}: call it in a line before, and give what it returns a name")


def _outermost_guard(work: Work, output: Output, node: Node) -> Node | None:
    found: Node | None = None
    for each in work.script.ancestors(node):
        if each in work.edits.guarded or (isinstance(each, cst.If) and output.asks_for_writer(each)):
            found = each
        if isinstance(each, cst.FunctionDef):
            break
    return found


def _vary_noise(work: Work, loops: Loops) -> None:
    """Let each rank draw other random numbers for its samples, although the script's seed is the same on all."""
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
    """The outermost loop around a training loop, also followed through the first calls of its functions."""
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
    """Add the import and the call that joins the ranks, before any call that may need ranks or random numbers."""
    script, edits, users = work.script, work.edits, _users(work)
    body: list[Node] = [*script.module.body]
    running = [each for each in body if not isinstance(each, _DEFINITIONS)]
    if not any(_needs_ranks(work, each, users) for each in running):
        text = "nothing in this file runs the training, so there is no place to start the ranks, and"
        work.refuse(script.module, f"{text} {_ONE_FILE}")
        return
    first = next(each for each in running if _needs_ranks(work, each, users) or _may_draw(script, each))
    # The script may import torch inside a `try`.
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
    numbers = [script.code(each.args[0].value) for each in work.seeds(are_numbers=True)]
    line = f"{work.world} = evenstep.init(seed={numbers[0] if numbers else 0})"
    edits.before.setdefault(statement, []).insert(int(statement is above), line)
    edits.comments.setdefault(statement, []).insert(0, work.launch)


def _remark_on_drawn_seeds(work: Work) -> None:
    """Remark on seeds that the script draws: they no longer differ between runs, since evenstep seeds their source."""
    script = work.script
    assigned = [each for each in script.nodes if isinstance(each, cst.Assign)]
    for seeding in work.seeds(are_numbers=False):
        seed = seeding.args[0].value
        parts = {script.code(each) for each in script.inside(seed)}
        kept = [each.value for each in assigned if script.code(each.targets[0].target) in parts]
        sources = {each for node in (seed, *kept) for each in work.losses.slice(node) if isinstance(each, cst.Call)}
        if any((script.qualified(each.func) or "").startswith(("random.", "numpy.random.")) for each in sources):
            text = "a seed that is drawn is the same in every run now: choose one in evenstep.init"
            work.note(seeding, text, mark=True)


def _users(work: Work) -> set[str]:
    """The functions and classes of the script that need the ranks, directly or through others that they name."""
    script = work.script
    around = [each for node in work.edits.touched() for each in script.ancestors(node)]
    users = {each.name.value for each in around if isinstance(each, _DEFINITIONS)}
    named = {
        each.name.value: {by.value for by in script.inside(each) if isinstance(by, cst.Name)}
        for each in script.nodes
        if isinstance(each, _DEFINITIONS)
    }
    while more := {name for name in named.keys() - users if named[name] & users}:
        users |= more
    return users


def _needs_ranks(work: Work, statement: Node, users: set[str]) -> bool:
    script, touched = work.script, {*work.edits.touched()}
    return any(
        node in touched or (isinstance(script.parent(node), cst.Call | cst.Arg) and script.code(node) in users)
        for node in script.inside(statement)
    )


def _may_draw(script: Script, statement: Node) -> bool:
    """Whether a statement may draw random numbers, for example to split data: they must be equal on all ranks."""
    for call in (each for each in script.inside(statement) if isinstance(each, cst.Call)):
        name, own = script.qualified(call.func), script.code(call.func)
        if name is not None and name.split(".")[0] not in sys.stdlib_module_names - {"random"}:
            return True
        if any(isinstance(each, _DEFINITIONS) for each in script.bound(own, call)):
            return True
    return False
