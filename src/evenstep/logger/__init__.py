"""Logging of a run's numbers, to a file of JSON lines and to trackers: `logger` has `Logger`."""
