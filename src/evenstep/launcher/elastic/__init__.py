"""One node's part in a run that restarts, alone or with other nodes.

Reading order, from the roof down:

1. `agent`: torchelastic's agent, extended: rendezvous, start, restart.
2. `supervisor`: the ranks of one attempt. It watches them, finds the root cause of a failure, and stops the others.
   `attempt`: their processes, and what these leave. `looks`: stacks of ranks that haven't stepped for a while.
3. `heartbeat`: the launchers of a run's nodes show each other that they are alive, and which rank failed first.
   `agreement`: what all nodes know of an attempt that has ended, so that they decide alike.
4. `rendezvous`: how they find each other. `restarts`: what is remembered from one attempt to the next.
"""
