"""Rules about data: which rank loads which samples."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from evenstep.tools.doctor.diagnosis.asking import (
    RANK_IN_ARGUMENTS,
    WORLD,
    assignments_to,
    depends_on_ranks,
    divides_by_hand,
    found,
    is_nothing,
    is_of_rank,
    is_true,
    names_in,
    on_all_ranks,
    on_ranks,
    origins,
    runs,
    walk,
)
from evenstep.tools.doctor.findings import Finding
from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.program import Call, Function, dotted, text_of
from evenstep.tools.reading.values import Thing

_GLOBAL = re.compile(r"(?i)global|total_batch|effective|overall|full_batch")
_LOCAL = re.compile(r"(?i)per_?(?:gpu|device|rank|replica|process|worker)|local_batch|micro_?batch")


def check(script: Script) -> Iterator[Finding]:
    """Findings of this group."""
    if script.is_distributed:
        yield from _no_sampler(script)
        yield from _same_draws(script)
        yield from _sampler_of_the_node(script)
        yield from _unseeded_split(script)
        yield from _no_set_epoch(script)
        yield from _batch_sizes(script)
        yield from _padded_validation(script)
        yield from _whole_streams(script)
    yield from _seeds_of_workers(script)


def _is_torchs(loader: Thing) -> bool:
    return loader.kind == "loader" and loader.site is not None and not loader.site.name.startswith("evenstep.")


def _training_loaders(script: Script) -> list[Call]:
    sites = {each.site for each in script.training_loaders if _is_torchs(each) and each.site is not None}
    return [call for call in script.calls if call in sites]


def _sampler(loader: Call) -> cst.CSTNode | None:
    given = [loader.argument("sampler", 3), loader.argument("batch_sampler", 4)]
    return next((each for each in given if not is_nothing(each)), None)


def _no_sampler(script: Script) -> Iterator[Finding]:
    for loader in _training_loaders(script):
        if loader in script.values.prepared or loader.has_star or not on_ranks(script, loader):
            continue
        if script.perhaps_some_ranks_only(loader.frame):
            continue
        sampler = _sampler(loader)
        if sampler is not None and script.values.kinds(sampler, loader.frame) != {"local sampler"}:
            continue
        dataset = loader.argument("dataset", 0)
        if "stream" in script.values.kinds(dataset, loader.frame) or _streams(script, loader):
            continue
        if divides_by_hand(script) or depends_on_ranks(script, dataset, loader.frame):
            continue
        has = f"the sampler {text_of(sampler)}, which doesn't know of ranks" if sampler is not None else "no sampler"
        if script.uses_accelerate and not script.uses_torch_distributed:
            mend = "loader = accelerator.prepare(loader)"
        elif script.uses_fabric:
            mend = "loader = fabric.setup_dataloaders(loader)"
        else:
            mend = ""
        yield found("EV101", loader, f"{loader.text} has {has}", mend=mend)


_DRAWS = ("randint", "randperm", "integers")


def _seeds(script: Script) -> list[Call]:
    """Calls that seed a generator which all of the process draws from."""
    names = (".manual_seed", ".manual_seed_all", ".seed_everything", ".set_seed", "numpy.random.seed", "random.seed")
    return [call for call in script.named(*names) if script.is_reached(call.frame)]


def _same_draws(script: Script) -> Iterator[Finding]:
    """Batches that the script draws itself, from generators with the same seed on every rank."""
    seeds = _seeds(script)
    alike = seeds and not any(
        is_of_rank(script, each, call.frame) or RANK_IN_ARGUMENTS.search(text_of(each))
        for call in seeds
        for each in call.arguments
    )
    if not alike or script.training_loaders or script.looked.unknown or divides_by_hand(script):
        return
    draws = [call for call in script.calls if call.last in _DRAWS and call.name and call.argument("generator") is None]
    for call in draws:
        if any(loop in script.step_loops for loop in script.loops_around(call.frame)):
            yield found(
                "EV101",
                call,
                f"{call.text} draws the same on every rank, as {seeds[0].text} seeds all of them alike",
                mend=f"{dotted(seeds[0].node.func)}(seed + rank)",
            )
            return


def _sampler_of_the_node(script: Script) -> Iterator[Finding]:
    for loader in _training_loaders(script) if not script.starts_ranks else ():
        for sampler in script.things(_sampler(loader), loader.frame):
            site = sampler.site
            if sampler.kind != "sampler" or site is None:
                continue
            rank, num_replicas = site.argument("rank", 2), site.argument("num_replicas", 1)
            if script.values.kinds(rank, site.frame) == {"local rank"} and "local" not in text_of(num_replicas).lower():
                yield found(
                    "EV101",
                    site,
                    f"rank={text_of(rank)} is the rank within a node: with several nodes their ranks read the same",
                    mend="sampler = DistributedSampler(train_set)  # asks the process group",
                )


def _unseeded_split(script: Script) -> Iterator[Finding]:
    if any("seed" in call.last.lower() for call in script.calls if script.is_reached(call.frame)):
        return
    for call in script.named("torch.utils.data.random_split"):
        if call.argument("generator", 2) is None and on_all_ranks(script, call):
            yield found("EV110", call, f"{call.text} has no generator, and no seed is set")


def _no_set_epoch(script: Script) -> Iterator[Finding]:
    told: set[Call] = set()
    constant: dict[Call, Call] = {}
    for call in script.named(".set_epoch"):
        samplers = [each.site for each in script.things(call.receiver, call.frame) if each.kind == "sampler"]
        sites = [each for each in samplers if each is not None]
        if not sites:  # of an object that isn't known: perhaps the very one
            return
        for each in sites:
            if isinstance(call.positional(0), cst.Integer):
                constant[each] = call
            else:
                told.add(each)
    for loader in _training_loaders(script):
        if loader in script.values.prepared:
            continue
        for sampler in script.things(_sampler(loader), loader.frame):
            site = sampler.site
            if sampler.kind != "sampler" or site is None or site in told or site.has_star:
                continue
            if text_of(site.argument("shuffle", 3)) == "False" or not _has_epochs(script, loader):
                continue
            if site in constant:
                same = constant[site]
                yield found("EV102", same, f"{same.text} sets the same epoch each time")
            else:
                yield found("EV102", site, f"{site.text} shuffles, and its set_epoch is never called")
            told.add(site)


def _has_epochs(script: Script, loader: Call) -> bool:
    """True if a loader is gone through more than once: a loop around the loop that reads it."""
    for loop in script.training_loops:
        if any(each.site is loader for each in script.loaders_of(loop)):
            if loop.iterates is None or (isinstance(loop.iterates, cst.Call) and dotted(loop.iterates.func) == "range"):
                return True  # `next(batches)` in a loop over steps
            outer = loop.frame.parent
            if outer is not None and script.loops_around(outer):
                return True
    return False


def _batch_sizes(script: Script) -> Iterator[Finding]:
    splits = script.uses("split_batches")
    for loader in script.named("torch.utils.data.DataLoader", "evenstep.DataLoader"):
        ours = loader.name.startswith("evenstep.")
        if not (loader in _training_loaders(script) or ours) or not on_ranks(script, loader):
            continue
        size = loader.argument("global_batch_size" if ours else "batch_size", 1)
        if size is None or splits:
            continue
        texts = [text_of(each) for each, _ in origins(script, size, loader.frame)]
        joined = " ".join(texts)
        if ours:
            local = next((each for each in texts if _LOCAL.search(each) and not WORLD.search(each)), None)
            divided = re.search(rf"//\s*[\w.()]*(?:{WORLD.pattern[4:]})", joined)
            if (local and not WORLD.search(joined)) or divided:
                yield found(
                    "EV104",
                    loader,
                    f"global_batch_size={text_of(size)} is the batch of one rank",
                    mend="loader = evenstep.DataLoader(train_set, global_batch_size=batch_per_rank * world.world_size)",
                )
        elif _GLOBAL.search(joined) and not WORLD.search(joined) and "/" not in joined:
            what = next(each for each in texts if _GLOBAL.search(each))
            yield found("EV104", loader, f"batch_size={text_of(size)} is {what}, and each rank loads as many")
        elif (match := _times_world(script, size, loader)) is not None:
            yield found(
                "EV104",
                loader,
                f"batch_size={match} multiplies by the number of ranks, and each rank loads as many",
                mend="loader = DataLoader(train_set, batch_size=batch_per_rank, sampler=sampler)",
            )
        elif any(_LOCAL.search(each) and re.search(rf"//\s*[\w.()]*(?:{WORLD.pattern[4:]})", each) for each in texts):
            what = next(each for each in texts if _LOCAL.search(each))
            yield found(
                "EV104",
                loader,
                f"batch_size={what} divides the batch of one rank by the number of ranks",
                mend="loader = DataLoader(train_set, batch_size=batch_per_rank, sampler=sampler)",
            )


def _times_world(script: Script, size: cst.CSTNode, loader: Call) -> str | None:
    """A product with the number of ranks among what a batch size is made of."""
    for each, where in origins(script, size, loader.frame):
        if not isinstance(each, cst.BinaryOperation) or not isinstance(each.operator, cst.Multiply):
            continue
        if any("world size" in script.values.kinds(side, where) for side in (each.left, each.right)):
            return text_of(each)
    return None


def _padded_validation(script: Script) -> Iterator[Finding]:
    trims = re.search(
        r"\[\s*:\s*(?:len\(|n\w*_samples|num_|total)|drop_duplicates|gather_for_metrics|\bunique\(", script.code
    )
    for loop in script.evaluation_loops:
        function = loop.frame.function
        inside = [
            call for call in script.calls if call.frame.function is function and call.frame.file is loop.frame.file
        ]
        gathers = [
            call
            for call in inside
            if call.last == "gather"
            and "accelerator" in script.receiver_kinds(call)
            and loop in script.loops_around(call.frame)
        ]
        if gathers and not trims and any(each.site in script.values.prepared for each in script.loaders_of(loop)):
            yield found(
                "EV105",
                gathers[0],
                f"{gathers[0].text} gathers the samples that were repeated to fill the last batch, too",
                mend=f"accelerator.gather_for_metrics({', '.join(text_of(each) for each in gathers[0].arguments)})",
            )
        if trims or not runs(script, inside, _sums) or _keeps_elsewhere(script, inside):
            continue
        for loader in script.loaders_of(loop):
            if loader.site is None or loader.site in script.values.prepared or not _is_torchs(loader):
                continue
            for sampler in script.things(_sampler(loader.site), loader.site.frame):
                site = sampler.site
                if sampler.kind != "sampler" or site is None or site.name.startswith("evenstep."):
                    continue
                if is_nothing(site.argument("drop_last", 5)) or text_of(site.argument("drop_last", 5)) == "False":
                    yield found(
                        "EV105",
                        site,
                        f"{site.text} repeats samples, unless their number is a multiple of the number of ranks; "
                        f"line {loop.line} counts them",
                    )


def _sums(call: Call) -> bool:
    return call.name.startswith("torch.distributed.") and "reduce" in call.last


def _keeps_elsewhere(script: Script, calls: list[Call]) -> bool:
    """True if an object that isn't known is given the results, which may count each sample once."""
    updates = [call for call in calls if call.last in ("update", "add_batch") and call.receiver is not None]
    roots = [(dotted(call.receiver).partition(".")[0], call) for call in updates]
    return any(
        root != "self" and not script.things(each.value, each.frame)
        for root, call in roots
        for each in assignments_to(script, root, call.frame)
    )


def _streams(script: Script, loader: Call) -> bool:
    return any(
        thing.kind == "dataset" and thing.site is not None and is_true(thing.site.argument("streaming"))
        for each, where in origins(script, loader.argument("dataset", 0), loader.frame)
        for thing in script.things(each, where)
    )


def _whole_streams(script: Script) -> Iterator[Finding]:
    for loader in _training_loaders(script):
        dataset = loader.argument("dataset", 0)
        streams = [each for each in script.things(dataset, loader.frame) if each.kind == "stream"]
        if loader in script.values.prepared and script.uses_accelerate:
            continue  # which shards streams, or sends batches from rank 0
        if not streams and not _streams(script, loader):
            continue
        if depends_on_ranks(script, dataset, loader.frame) or divides_by_hand(script):
            continue
        if streams and streams[0].cls is not None:
            yield found("EV106", loader, f"{streams[0].cls.name} is an IterableDataset that never looks at the rank")
        else:
            yield found(
                "EV106",
                loader,
                f"{text_of(dataset)} is a stream that isn't divided among ranks",
                mend="dataset = split_dataset_by_node(dataset, rank=rank, world_size=world_size)",
            )


def _seeds_of_workers(script: Script) -> Iterator[Finding]:
    loaders = [call for call in script.named("torch.utils.data.DataLoader") if _has_workers(call)]
    seen: set[int] = set()
    for loader in loaders:
        init = loader.argument("worker_init_fn", 9)
        if init is not None:
            for call, parameters in _calls_of(script, init, loader):
                if id(call) in seen or call.last not in ("seed", "manual_seed", "seed_everything", "set_seed"):
                    continue
                texts = [
                    text_of(each) for argument in call.arguments for each, _ in origins(script, argument, call.frame)
                ]
                if not any(re.search(r"initial_seed|worker|get_rng|info", each) for each in texts) and not any(
                    name in names_in(argument) for argument in call.arguments for name in parameters
                ):
                    seen.add(id(call))
                    yield found("EV108", call, f"{call.text} seeds every worker alike")
            continue
        for thing in script.things(loader.argument("dataset", 0), loader.frame):
            if thing.cls is not None and id(thing.cls) not in seen:
                seen.add(id(thing.cls))
                yield from _copied_generators(script, thing)


def _has_workers(loader: Call) -> bool:
    workers = loader.argument("num_workers", 5)
    return workers is not None and text_of(workers) not in ("0", "None")


def _calls_of(script: Script, init: cst.CSTNode, loader: Call) -> Iterator[tuple[Call, tuple[str, ...]]]:
    """The calls in a `worker_init_fn`, with its parameters."""
    if isinstance(init, cst.Lambda):
        inside = {id(each) for each in walk(init)}
        parameters = tuple(str(each.name.value) for each in init.params.params)
        yield from ((call, parameters) for call in script.calls if id(call.node) in inside)
    name = dotted(init)
    function: Function | None = loader.frame.file.functions.get(name)
    if function is not None:
        yield from ((call, function.parameters) for call in script.calls if call.frame.function is function)


_GENERATORS = re.compile(
    r"(?:np|numpy)\.random\.(?:default_rng|RandomState|Generator)\(|random\.Random\(|torch\.Generator\("
)


def _copied_generators(script: Script, dataset: Thing) -> Iterator[Finding]:
    """Generators made once in the data set, and drawn from in `__getitem__` by workers that each have a copy."""
    cls = dataset.cls
    if cls is None or "get_worker_info" in text_of(cls.node):
        return
    for assignment in cls.file.assignments:
        function, name = assignment.frame.function, dotted(assignment.target)
        if function is None or function.cls is not cls or function.name != "__init__":
            continue
        if not name.startswith("self.") or not _GENERATORS.search(text_of(assignment.value)):
            continue
        readers = [method for key, method in cls.methods.items() if key in ("__getitem__", "__iter__")]
        drawn = any(re.search(rf"{re.escape(name)}\b", text_of(method.node)) for method in readers)
        if drawn:
            line = assignment.line
            evidence = f"{name} is made once; each worker of the loader draws from a copy of it"
            yield found("EV108", (cls.file, line), evidence)
