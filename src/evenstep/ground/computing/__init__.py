"""Everything that a rank's results depend on.

- `determinism`: torch's settings that make results repeatable.
- `virtual_ranks`: the virtual ranks of reproducible mode.
- `randomness`: every random stream.
- `device`: the device on which this rank computes.
- `pytrees`: containers of tensors.
"""
