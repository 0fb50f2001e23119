"""One node's part in a run that restarts, alone or with other nodes.

Reading order, from the roof down:

1. `agent`: torchelastic's agent with our attempts. It decides whether the run ends or starts its ranks again.
2. `attempt`: one attempt. It watches its ranks, finds the root cause of a failure, and stops the others.
3. `nodes`: the launchers of a run's nodes exchange heartbeats, the rank that failed first, what was saved, and the
   number of restarts, so that all make the same decisions.
4. `rendezvous`: how the launchers find each other.
"""
