"""`evenstep estimate`: how much memory a rank needs, and whether data parallelism is enough.

It takes a function that builds the model, or a script. It calls the function with torch's fake tensors, which have
shapes and no memory, so the model may be larger than this machine. It runs the script as it is, in a process of its
own, for three steps.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from argparse import REMAINDER, SUPPRESS, ArgumentError, ArgumentParser, Namespace
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
from evenstep.named_files import validate_script, validate_target, write_report
from evenstep.replica.gradients.buckets.layout import ParameterSpec
from evenstep.temporary import private_directory
from evenstep.tools.estimate.footprint import Sizes, footprint_table, footprints, verdict
from evenstep.tools.estimate.probe import sizes_of

_OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (optim.AdamW, {}),
    "adam": (optim.Adam, {}),
    "sgd": (optim.SGD, {}),
    "momentum": (optim.SGD, {"momentum": 0.9}),
    "rmsprop": (optim.RMSprop, {}),
    "adagrad": (optim.Adagrad, {}),
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `evenstep estimate`."""
    _add_flags(parser)
    parser.add_argument(
        "target",
        metavar="SCRIPT | FILE.py:FUNCTION",
        help="a script that trains with a torch optimizer: it runs on one rank and ends after three steps. Or a "
        "function in FILE.py or MODULE that returns the model, or (model, inputs of a batch): nothing is allocated",
    )
    parser.add_argument("arguments", nargs=REMAINDER, help="of the script").required = False


def _add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--ranks", default="8", metavar="N,N", help="ranks of all hosts to compute it for (default: 8)")
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", "--replicas", dest="ranks", default=SUPPRESS, help=SUPPRESS
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of a rank's device, such as 80G (default: the first GPU's, else this machine's)",
    )
    parser.add_argument(
        "--batch", type=int, metavar="N", help="samples of each rank (default: those of the function, or of the script)"
    )
    parser.add_argument(
        "--optimizer", choices=sorted(_OPTIMIZERS), help="for a function; a script has its own (default: adamw)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="for a function: of parameters, inputs and with them the optimizer's state (default: as built)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")


def run(args: Namespace) -> int:
    """Compute the memory of a script or of a function, print it, write the JSON.

    Raises:
        ConfigurationError: A flag makes no sense, or there is no such script or function.
        UsageError: The script or the function fails, makes too few steps, or its model can't run on "meta".
    """
    is_script = args.target.endswith(".py") or os.path.isfile(args.target)
    return _measure(args) if is_script else _estimate(args)


def _estimate(args: Namespace) -> int:
    _read_flags_behind(args)
    validate_target("--json", args.json, args.target)
    counts = parse_counts(args.ranks)
    with torch.device("meta"):
        built = _call(args.target)
        model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, ())
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"{args.target} returns {type(model).__name__}, and no torch.nn.Module.")
        dtype = args.dtype and getattr(torch, args.dtype)

        def placed(leaf: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(leaf, device="cpu", dtype=dtype if leaf.is_floating_point() else None)

        model = model.to("meta", dtype)
        inputs = list(inputs if isinstance(inputs, tuple | list) else [inputs])
    # On a CPU that isn't there: on "meta" torch would choose other kernels, which keep more.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        inputs = pytree.tree_map_only(torch.Tensor, placed, inputs)
        kind, settings = _OPTIMIZERS[args.optimizer or "adamw"]

        def build_optimizer(parameters: Sequence[nn.Parameter]) -> Optimizer:
            return kind(parameters, foreach=False, lr=1e-3, **settings)  # type: ignore[call-arg]

        sizes = sizes_of(model, build_optimizer, inputs)
    if not sizes.num_samples:
        sys.stdout.write(
            f"Activations aren't counted: {args.target} returns no inputs. Return (model, inputs) to count them.\n"
        )
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        sys.stdout.write("Recurrent layers keep more than is counted here: run the script itself to measure it.\n")
    return _tell(sizes, counts, args)


def _read_flags_behind(args: Namespace) -> None:
    """A script's arguments follow it; a function has none, so what follows are flags of ours."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_flags(parser)
    try:
        _, rest = parser.parse_known_args(args.arguments, args)
    except ArgumentError as error:
        raise ConfigurationError(f"{error}.") from None
    if rest:
        raise ConfigurationError(f"{args.target} is a function, and takes no arguments: {' '.join(rest)}.")


def _measure(args: Namespace) -> int:
    counts = parse_counts(args.ranks)
    for name, value in (("--optimizer", args.optimizer), ("--dtype", args.dtype)):
        if value is not None:
            raise ConfigurationError(f"{name} is for FILE.py:FUNCTION; {args.target} is a script, which has its own.")
    validate_target("--json", args.json, args.target)
    validate_script(args.target)
    received = run_script(args.target, args.arguments)
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
    return _tell(sizes, counts, args)


def run_script(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script for three steps in a process of its own, and return what `probe` wrote.

    Raises:
        UsageError: It failed, or ended before.
    """
    with private_directory("memory") as directory:
        out = directory / "memory.json"
        # As a rank: a script for torch's wrapper asks the environment which one it is.
        command = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", "1"]
        command += ["-m", "evenstep.tools.estimate.probe", str(out), script, *arguments]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        if out.exists():
            received: dict[str, Any] = json.loads(out.read_text())
            return received
    ending = f"failed with status {done.returncode}" if done.returncode else "ended before its third optimizer step"
    said = done.stderr[-4000:].rstrip()
    raise UsageError(f"{script} {ending}." + (f" It said:\n{said}" if said else ""))


def _tell(sizes: Sizes, counts: Sequence[int], args: Namespace) -> int:
    if args.batch is not None:
        if args.batch < 1:
            raise ConfigurationError(f"--batch {args.batch}: at least 1.")
        if sizes.num_samples == 0:
            raise ConfigurationError(f"--batch {args.batch}: no batch was seen that could be made larger or smaller.")
        sizes = sizes.at(args.batch)
    memory_bytes = parse_size(args.memory) if args.memory is not None else device_bytes()
    rows = footprints(sizes, counts)
    verdicts = {count: verdict(sizes, count, memory_bytes) for count in counts}
    samples = f", {checks.counted(sizes.num_samples, 'sample')} a rank" if sizes.num_samples else ""
    lines = [f"{sum(spec.numel for spec in sizes.parameters):,} trained parameters{samples}", "", footprint_table(rows)]
    for count, said in verdicts.items():
        lines += ["", f"{count:,} ranks: {said[0]}", *(f"  {line}" for line in said[1:])]
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json is not None:
        report = {
            "kind": "memory",
            "version": 2,
            "memory_bytes": memory_bytes,
            "rows": [row.to_json() for row in rows],
            "verdicts": verdicts,
        }
        write_report(args.json, json.dumps(report, indent=1))
    return 0


def parse_counts(text: str) -> list[int]:
    """ "8,16" is [8, 16]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigurationError(f"--ranks {text}: write numbers from 1 on, such as 8,16,64.")
    return [int(part) for part in parts]


def parse_size(text: str) -> int:
    """ "64M" is 64 MiB."""
    parts = re.fullmatch(r"0*([1-9]\d*)([KMG]?)(?:I?B)?", text.upper())
    if parts is None:
        raise ConfigurationError(f"{text!r} is no size: write 4096, 64K, 16M or 1G.")
    return int(parts[1]) * _UNITS[parts[2]]


def device_bytes() -> int:
    """Memory of the first GPU; of this machine if there is none."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _call(target: str) -> Any:
    """Call the function that "FILE.py:FUNCTION" or "MODULE:FUNCTION" names."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ConfigurationError(f"{target}: write FILE.py:FUNCTION, such as train.py:build_model.")
    folder = str(Path(where).absolute().parent)
    sys.path.insert(0, folder)  # modules beside a file can be imported, as with `python FILE.py`
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
            spec.loader.exec_module(module)
        elif os.path.exists(where):
            raise ConfigurationError(f"{target}: {where} is no python file. Write FILE.py:FUNCTION.")
        else:
            module = importlib.import_module(where)
    except ConfigurationError:
        raise
    except Exception as error:
        # Imported is all that stands at the top level of a file, with fake tensors: a script would train there.
        raise UsageError(
            f"{where} can't be imported: {type(error).__name__}: {error}\nWhat stands at its top level is run, without "
            f'data: put what trains under `if __name__ == "__main__":`, or the function into a file of its own.'
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{target}: {where} has no function {name!r}.")
    return function  # type: ignore[no-any-return]
