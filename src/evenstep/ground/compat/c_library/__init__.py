"""Functions of this process's C libraries that evenstep needs and python doesn't offer.

- `libc`: looks functions up by name; the other modules use it.
- `mapping`: maps files into memory.
- `heap`: keeps freed memory in glibc's heap.
- `openmp`: ends threads that wait in a busy loop.
"""
