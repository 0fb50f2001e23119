"""Private names of torch and of the C libraries, each in one place, with the versions that have it.

- `torch_<theme>`: private names of torch, one file for each of its parts. Names that evenstep can't do without are
  bound when the file is imported, here; for the others, its `NAMES` lists what depends on them.
- `private_names`: a row of such a list.
- `c_library`: C functions that python doesn't offer.
"""

import importlib

import torch

from evenstep.ground.compat.private_names import SEEN

# All but torchelastic's, which only the launcher needs.
_THEMES = ("autograd", "data", "ddp", "distributed", "dynamo", "modules", "profiler", "pytree", "tensors")

for theme in _THEMES:
    try:
        importlib.import_module(f"{__name__}.torch_{theme}")
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} lacks a private name that evenstep needs: {error}. Torch {', '.join(SEEN)} "
            f"have it: install one of these, or a newer evenstep."
        ) from error
