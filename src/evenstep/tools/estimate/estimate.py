"""`evenstep estimate`: how much memory a rank needs, and whether data parallelism is enough.

It takes a function that builds the model, or a script. It calls the function with torch's fake tensors, which have
shapes but no memory, so the model may be larger than this machine. It runs a script unchanged for three steps, in a
separate process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import Optimizer

from evenstep import checks
from evenstep.errors import ConfigurationError, EvenstepError, UsageError
from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.compat.torch_profiler import FakeTensorMode
from evenstep.ground.environment import with_settings
from evenstep.ground.host.named_files import validate_script, write_report
from evenstep.ground.host.temporary import private_directory
from evenstep.replica.gradients.buckets.layout import ParameterSpec
from evenstep.tools.estimate.footprint import Sizes, footprint_table, footprints, verdict
from evenstep.tools.estimate.probe import sizes_of, with_batch
from evenstep.tools.observing.launch import Observed, launched

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (optim.AdamW, {}),
    "adam": (optim.Adam, {}),
    "sgd": (optim.SGD, {}),
    "momentum": (optim.SGD, {"momentum": 0.9}),
    "rmsprop": (optim.RMSprop, {}),
    "adagrad": (optim.Adagrad, {}),
}


def run(args: Namespace) -> int:
    """Compute the memory of a script or of a function's model, print it, and write the JSON.

    Raises:
        ConfigurationError: A flag makes no sense, or there is no such script or function.
        UsageError: The script or the function fails, makes too few steps, or its model can't run on "meta".
    """
    is_script = args.script.endswith(".py") or os.path.isfile(args.script)
    return _measure(args) if is_script else _estimate(args)


def _estimate(args: Namespace) -> int:
    if args.arguments:
        raise ConfigurationError(
            f"{args.script} is a function, and takes no arguments: {' '.join(args.arguments)}. Options stand before it."
        )
    with torch.device("meta"):
        built = _call(args.script)
        model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, ())
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"{args.script} returns {type(model).__name__}, and no torch.nn.Module.")
        model = model.to("meta")
        inputs = list(inputs if isinstance(inputs, tuple | list) else [inputs])
    # Fake tensors claim to be on the CPU: on "meta", torch would choose other kernels, which save more activations.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        inputs = pytree.tree_map_only(torch.Tensor, lambda leaf: torch.empty_like(leaf, device="cpu"), inputs)
        kind, settings = OPTIMIZERS[args.optimizer or "adamw"]

        def build_optimizer(parameters: Sequence[nn.Parameter]) -> Optimizer:
            return kind(parameters, foreach=False, lr=1e-3, **settings)  # type: ignore[call-arg]

        if args.batch is not None:
            inputs = with_batch(inputs, args.batch)
        sizes = sizes_of(model, build_optimizer, inputs)
    if args.batch not in (None, sizes.num_samples):
        raise ConfigurationError(f"--batch {args.batch}: {args.script} returns no inputs with a batch.")
    if not sizes.num_samples:
        sys.stdout.write(
            f"Activations aren't counted: {args.script} returns no inputs. Return (model, inputs) to count them.\n"
        )
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        sys.stdout.write("Recurrent layers keep more than is counted here: run the script itself to measure it.\n")
    return _tell(sizes, args)


def _measure(args: Namespace) -> int:
    for option in ("optimizer", "batch"):
        if getattr(args, option) is not None:
            raise ConfigurationError(
                f"--{option} is for FILE.py:FUNCTION; {args.script} is a script, which has its own."
            )
    validate_script(args.script)
    received = run_script(args.script, args.arguments)
    peak_bytes, gradient_bytes = received.pop("peak_bytes"), received.pop("gradient_bytes")
    specs = (
        ParameterSpec("", tuple(shape), getattr(torch, dtype), torch.device("cpu"))
        for shape, dtype in received.pop("parameters")
    )
    sizes = Sizes(tuple(specs), **received)
    parts = {
        "parameters": sizes.parameter_bytes,
        "gradients": gradient_bytes,
        "optimizer": sizes.state_bytes,
        "activations": sizes.activation_bytes,
    }
    sys.stdout.write(
        f"Measured on one rank, in MiB: {', '.join(f'{name} {size / 2**20:,.1f}' for name, size in parts.items())} for "
        f"{sizes.num_samples or 'unknown'} samples; the process had {peak_bytes / 2**20:,.1f} at most.\n"
    )
    return _tell(sizes, args)


def run_script(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script for three steps in a separate process, and return the sizes that `probe` wrote.

    Raises:
        UsageError: The script failed, or ended before its third step.
    """
    with private_directory("memory") as directory:
        out = directory / "memory.json"
        # Started as a rank, because a script for torch's wrapper reads its rank from the environment.
        observed = Observed("evenstep.tools.estimate.probe", script, arguments, 1)
        with launched(observed, directory, with_settings(), [str(out)]) as made:
            status = made.process.wait()
        if out.exists():
            received: dict[str, Any] = json.loads(out.read_text())
            return received
        ending = f"failed with status {status}" if status else "ended before its third optimizer step"
        raise UsageError(f"{script} {ending}. It said:\n{made.said()}")


def _tell(sizes: Sizes, args: Namespace) -> int:
    memory_bytes = args.memory or device_bytes()
    rows = footprints(sizes, args.ranks)
    verdicts = {count: verdict(sizes, count, memory_bytes) for count in args.ranks}
    samples = f", {checks.counted(sizes.num_samples, 'sample')} a rank" if sizes.num_samples else ""
    lines = [f"{sum(spec.numel for spec in sizes.parameters):,} trained parameters{samples}", "", footprint_table(rows)]
    for count, said in verdicts.items():
        lines += ["", f"{count:,} ranks: {said[0]}", *(f"  {line}" for line in said[1:])]
    sys.stdout.write("\n".join(lines) + "\n")
    report = {"kind": "memory", "version": 3, "memory_bytes": memory_bytes, "verdicts": verdicts}
    write_report(args.json, json.dumps({**report, "rows": [row.to_json() for row in rows]}, indent=1))
    return 0


def device_bytes() -> int:
    """The memory of the first GPU, or of this machine if there is none."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _call(target: str) -> Any:
    """Call the function that "FILE.py:FUNCTION" or "MODULE:FUNCTION" names."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ConfigurationError(f"{target}: write FILE.py:FUNCTION, such as train.py:build_model.")
    folder = str(Path(where).absolute().parent)
    sys.path.insert(0, folder)  # the file can import modules of its folder, as with `python FILE.py`
    try:
        return _find(where, name, target)()
    except EvenstepError:
        raise
    except Exception as error:
        raise UsageError(f"{target} failed: {type(error).__name__}: {error}") from error
    finally:
        with contextlib.suppress(ValueError):  # the file may have removed it
            sys.path.remove(folder)


def _find(where: str, name: str, target: str) -> Callable[[], Any]:
    try:
        if where.endswith(".py"):
            validate_script(where)
            spec = importlib.util.spec_from_file_location("_evenstep_estimated", where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # data classes look up the types of their fields there
            spec.loader.exec_module(module)
        elif os.path.exists(where):
            raise ConfigurationError(f"{target}: {where} is no python file. Write FILE.py:FUNCTION.")
        else:
            module = importlib.import_module(where)
    except ConfigurationError:
        raise
    except Exception as error:
        # The import runs all code at the top level of the file with fake tensors: a script would start to train.
        raise UsageError(
            f"{where} can't be imported: {type(error).__name__}: {error}\nIts top level is run, without data: put "
            f'the training under `if __name__ == "__main__":`, or the function into a file of its own.'
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{target}: {where} has no function {name!r}.")
    return function  # type: ignore[no-any-return]
