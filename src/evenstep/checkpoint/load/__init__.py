"""Loading: all ranks read a checkpoint and agree that it is good, and only then change anything.

Read `restore` first. `compare` lists the differences between the checkpoint and this run's objects; `reader` reads
tensors and confirms checksums; `layouts` determines which elements of a DTensor this rank reads. `mirror` makes a node
read an object store only once. `recovery` decides which step to resume from if each node has its own generations, and
`fetch` reads that step; a node gets missing files from a peer.
"""
