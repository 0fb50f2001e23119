"""What a rank shows of itself, readable from outside the process: by its launcher and by its peers.

Reading order:

1. `heartbeat`: the heartbeat page: phase, step, collective, since when the rank waits. Written with plain stores.
2. `phase_timeouts`: how long a rank may stay in a phase while others wait for it.
3. `peer_heartbeats`: the pages of the node's other ranks, under any launcher or without one.
4. `steps`: counts optimizer steps and notices compilations by torch's global hooks; finds stragglers.
5. `first_failure`: crash reports, and which of several failures was the first.
6. `excepthook`: how an exception ends a rank: what is printed and reported, with which status.
7. `telemetry`: how long the parts of the last steps took.
"""
