"""What a rank shows of itself, readable from outside the process: by its launcher and by its peers.

Reading order:

1. `heartbeat`: a rank's page in memory: phase, step, collective, since when it waits; its report. Plain stores.
2. `phase_timeouts`: how long a rank may stay in a phase while others wait for it.
3. `first_failure`: crash reports, and which of several failures was the first.
4. `peer_heartbeats`: who makes the pages of a node's ranks, and how its processes find them.
5. `users_code`: which lines of a stack are the user's.
6. `excepthook`: how an exception ends a rank: what is printed and reported, with which status.
7. `steps`: optimizer steps and compilations, seen by torch's global hooks; finds stragglers.
8. `telemetry`: a step's events: phases of the page, and how long the parts of the last steps took.
"""
