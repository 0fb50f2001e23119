"""The decisions for all servers and workers. Pure.

Reading order:

    coordinator.py  which pushes make an update, and which workers may continue
    batch_queue.py  which worker takes which batch of an epoch
"""
