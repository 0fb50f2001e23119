"""workers draw the same random numbers (warning).

Loader workers begin with the same random state: a constant seed, or a generator that each of them copied.

Samples of different workers have the same augmentation, in every batch.

torch seeds `random`, torch and NumPy differently in each worker. That is lost if `worker_init_fn` seeds with a
constant, and it doesn't reach a generator that the data set holds.

Wrong:

```python
def seed_worker(worker_id):
    np.random.seed(0)


loader = DataLoader(train_set, batch_size=64, num_workers=4, worker_init_fn=seed_worker)
```

Right:

```python
def seed_worker(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


loader = DataLoader(train_set, batch_size=64, num_workers=4, worker_init_fn=seed_worker)
```

Ignore it if the numbers drawn don't depend on the sample.
"""

import re
from collections.abc import Iterator

import libcst as cst

from evenstep.tools.doctor.asking import (
    Call,
    Class,
    Found,
    Script,
    behind,
    dotted,
    found,
    names_in,
    text_of,
    walk,
)
from evenstep.tools.doctor.scene import Scene, Seen, same_draws

_SEEDS = ("seed", "manual_seed", "seed_everything", "set_seed")
_GENERATORS = re.compile(
    r"(?:np|numpy)\.random\.(?:default_rng|RandomState|Generator)\(|random\.Random\(|torch\.Generator\("
)


def read(script: Script) -> Found:
    """Constant seeds of workers, and generators that they copy."""
    for loader in script.named("torch.utils.data.DataLoader"):
        if text_of(loader.argument("num_workers", 5)) in ("", "0", "None"):
            continue
        init = loader.argument("worker_init_fn", 9)
        for call, parameters in _calls_of(script, init, loader) if init is not None else ():
            given = [(each, call.frame) for each in call.arguments]
            knows = any(behind(script, *each, r"initial_seed|worker|get_rng|info") for each in given)
            if call.last in _SEEDS and not knows and not any(names_in(each) & {*parameters} for each, _ in given):
                yield found(call, f"{call.text} seeds every worker alike")
        for dataset in script.values(loader.argument("dataset", 0), loader.frame) if init is None else ():
            if dataset.definition is not None:
                yield from _copied_generators(script.flow.class_record(dataset.definition))


def seen(run: Scene) -> Seen:
    """Two workers drew from one state."""
    for place, evidence in same_draws(run, of_workers=True):
        yield run.finding(place, evidence)


def _calls_of(script: Script, init: cst.CSTNode, loader: Call) -> Iterator[tuple[Call, tuple[str, ...]]]:
    """The calls in a `worker_init_fn`, with its parameters."""
    if isinstance(init, cst.Lambda):
        inside = {id(each) for each in walk(init)}
        parameters = tuple(str(each.name.value) for each in init.params.params)
        yield from ((call, parameters) for call in script.calls if id(call.node) in inside)
    function = loader.frame.file.functions.get(dotted(init))
    if function is not None:
        yield from ((call, function.parameters) for call in script.calls if call.frame.function is function)


def _copied_generators(cls: Class) -> Found:
    """Generators made once in the data set, and drawn from in `__getitem__` by workers that each have a copy."""
    if "get_worker_info" in text_of(cls.node):
        return
    readers = " ".join(text_of(cls.methods[key].node) for key in ("__getitem__", "__iter__") if key in cls.methods)
    for each in cls.file.assignments:
        function, name = each.frame.function, dotted(each.target)
        is_kept = function is not None and function is cls.methods.get("__init__") and name.startswith("self.")
        if is_kept and _GENERATORS.search(text_of(each.value)) and re.search(rf"{re.escape(name)}\b", readers):
            evidence = f"{name} is made once; each worker of the loader draws from a copy of it"
            yield found((cls.file, each.line), evidence)
