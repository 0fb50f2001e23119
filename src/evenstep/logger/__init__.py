"""The numbers of a run, in a file of JSON lines and for trackers: `logger` has `Logger`."""
