"""Private names of torch and functions of the C libraries, each in one place, with the versions that have it.

- `torch_<theme>`: private names of torch, one file for each of its parts. Names that evenstep needs in any case are
  bound when the file is imported, by this package. A file's `NAMES` lists the other names, and what depends on them.
- `private_names`: the class of a row of `NAMES`.
- `c_library`: C functions that python doesn't offer.
"""

import importlib

import torch

from evenstep.ground.compat.private_names import SEEN

# All themes but torchelastic, which only the launcher needs.
_THEMES = ("autograd", "data", "ddp", "distributed", "dynamo", "modules", "profiler", "pytree", "tensors")

for theme in _THEMES:
    try:
        importlib.import_module(f"{__name__}.torch_{theme}")
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} lacks a private name that evenstep needs: {error}. Torch {', '.join(SEEN)} "
            f"have it: install one of these, or a newer evenstep."
        ) from error
