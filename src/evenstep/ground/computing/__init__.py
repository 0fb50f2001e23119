"""What an answer depends on.

- `determinism`: torch's settings that make an answer repeatable.
- `virtual_ranks`: the virtual ranks of reproducible mode.
- `randomness`: every random stream.
- `device`: where this rank computes.
- `pytrees`: containers of tensors.
"""
