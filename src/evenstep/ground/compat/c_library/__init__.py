"""What evenstep needs of the C libraries in this process, and python doesn't offer.

- `libc`: functions by name. On it stand the others.
- `mapping`: files in memory.
- `heap`: what glibc does with freed memory.
- `openmp`: threads that spin.
"""
