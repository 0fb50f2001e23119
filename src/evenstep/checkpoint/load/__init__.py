"""Loading: all ranks read a checkpoint and agree that it is good, and only then change anything.

Read `restore` first. `compare` lists the differences between the checkpoint and this run's objects; `reader` reads
tensors and confirms checksums; `layouts` says which elements of a DTensor this rank reads, and finds parameters
into which they can be read without a copy.
"""
