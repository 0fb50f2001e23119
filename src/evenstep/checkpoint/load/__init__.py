"""Loading: all ranks read a checkpoint and agree that it is good, and only then change anything.

Read `restore` first. `compare` lists the differences between the checkpoint and this run's objects; `reader` reads
tensors and confirms checksums; `layouts` says which elements of a DTensor this rank reads. `mirror` has a node read an
object store once. `recovery` decides which step to resume from where each node has its own generations, and `fetch`
reads that, with what a node lacks from a peer.
"""
