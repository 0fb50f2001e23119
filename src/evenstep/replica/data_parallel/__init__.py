"""One process, several devices: `DataParallel`.

Reading order: `wrapper` (the class that users see), `replicas` (copies of a module in threads of their own, and a
forward and backward pass through them).
"""
