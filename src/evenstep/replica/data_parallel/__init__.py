"""One process, several devices: `DataParallel`.

Reading order: `wrapper` (the class that users see), `replicas` (copies of a module, each with its own thread, and a
forward and backward pass through them).
"""
