"""Data sets, and the batches that a loader gets from them.

`source` is the seam: what a loader needs. `samples` implements it for data sets that number their samples, `streams`
for iterable ones; `same_stream` compares what the processes are given that run through one stream. Data sets of our
own: `records` (lines, JSON lines and fixed-size records in many files) and `tokens` (windows of a text). Both read
mapped `files`; `readahead` asks the system for the next part of them in time.
"""
