"""The numbers of a run, in files: `logger` has `Logger`, `files` the kinds of file that it writes."""
