"""Servers: what they hold, and how they decide.

Reading order:

    serving.py      a server's process: what others call, and what happens when one of them is lost
    checkpoints.py  what `Checkpointer` saves of all servers, and how they go on from it
    shard.py        one server's parameters and optimizer: does what was decided
    coordinator.py  decides, for all servers, which pushes make an update, and who may go on. Pure
    batch_queue.py  which worker takes which batch of an epoch. Pure
"""
