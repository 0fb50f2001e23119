"""Groups of rank processes that run functions.

Reading order: `ranks` (the group, in the parent, and what runs in each process), `remote` (how calls, results and
exceptions are packed).
"""
