"""One process, several devices: `DataParallel`.

Reading order: `wrapper` (the class that users see), `replicas` (copies of a module that stay alive between steps, and a
pass through several of them), `worker_threads` (a thread for each replica).
"""
