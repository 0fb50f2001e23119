"""Functions of this process's C libraries that evenstep needs and python doesn't offer.

- `libc`: functions by name; the others use it.
- `mapping`: files in memory.
- `heap`: keeps freed memory in glibc's heap.
- `openmp`: threads that spin.
"""
