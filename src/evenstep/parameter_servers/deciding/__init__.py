"""The decisions for all servers and workers. Pure.

Reading order:

    coordinator.py  decides which pushes make an update, and which workers may continue
    batch_queue.py  decides which worker gets which batch of an epoch
"""
