"""What is decided for all servers and workers, from what has come. Pure.

Reading order:

    coordinator.py  which pushes make an update, and who may go on
    batch_queue.py  which worker takes which batch of an epoch
"""
