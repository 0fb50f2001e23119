"""Loading one batch at a time.

Read `fetch` first: a `Fetcher` makes a batch of a `Request`. `workers` runs it in processes of torch's own loader and
reports why a process died. `device_prefetch` copies batches to a GPU ahead of their use. `nested` finds the tensors
inside a batch, and `digests` compares what processes read.
"""
