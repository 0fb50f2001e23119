"""Starts ranks, watches them, and reports which one failed first.

Reading order, from the roof down; each imports only from those below it:

1. `run` (`evenstep run`, on torchelastic) and `launch` (`evenstep.launch`: ranks from a function).
2. `elastic/`: one node's agent, the ranks of one attempt, restarts, and messages between nodes.
3. `pool`: groups of rank processes that run one function after the other, for `launch`.
4. `failure/`: finds the rank that failed first, and makes the text that is printed.
5. `spawn/`: how a rank's process starts, and becomes the user's script.
6. `options/`: flags, numbers of ranks and threads, log files.

The launcher runs before there is a world, so it imports neither `world` nor anything above it.
"""
