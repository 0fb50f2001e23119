"""A rank's state, as its launcher and its peers see it from outside the process.

Reading order:

1. `heartbeat`: a rank's page in memory: phase, step, collective, start of a wait, report. Plain stores.
2. `phase_timeouts`: how long a rank may stay in a phase while others wait for it.
3. `first_failure`: crash reports, and which of several failures was the first.
4. `peer_heartbeats`: which process makes the pages of a node's ranks, and how the others find them.
5. `users_code`: which lines of a stack are the user's.
6. `excepthook`: output, report and exit status when an exception ends a rank.
7. `steps`: optimizer steps and compilations, seen by torch's global hooks; finds stragglers.
8. `telemetry`: a step's events: they set the page's phase, and show how long the parts of the last steps took.
"""
