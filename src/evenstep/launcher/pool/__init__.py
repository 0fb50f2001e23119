"""Groups of rank processes that run functions.

Reading order: `ranks` (the group, in the parent), `rank_process` (what runs in each process), `remote` (how calls,
results and exceptions are packed).
"""
