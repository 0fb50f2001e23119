"""Private names of torch and of the C libraries, each in one place, with the versions that have it.

- `torch_<theme>`: private names of torch, one file for each of its parts. Those without which evenstep can't go on are
  bound when the file is imported, here; of the others its `NAMES` says what depends on them.
- `private_names`: what such a row is.
- `c_library`: what python doesn't offer of C.
"""

import importlib

import torch

from evenstep.ground.compat.private_names import SEEN

# All but torchelastic's, which the launcher alone needs.
_THEMES = ("autograd", "data", "ddp", "distributed", "dynamo", "modules", "profiler", "pytree", "tensors")

for theme in _THEMES:
    try:
        importlib.import_module(f"{__name__}.torch_{theme}")
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} lacks a private name on which evenstep stands: {error}. It was seen in torch "
            f"{', '.join(SEEN)}: install one of these, or a newer evenstep."
        ) from error
