"""Private names of torch and of the C libraries, each in one place, with the versions that have it.

- `torch_<theme>`: private names of torch, one file for each of its parts.
- `private_names`: a list of them, with what depends on each. `import evenstep` refuses a torch that lacks one that it
  can't do without.
- `c_library`: what python doesn't offer of C.
"""

from evenstep.ground.compat.private_names import refuse_other_torch

refuse_other_torch()  # before the modules beside this one, which would fail with less of an explanation
