"""Data sets, and the batches that a loader gets from them.

`source` is the seam: what a loader needs. `samples` implements it for data sets that number their samples, `streams`
for iterable ones; `same_stream` compares what the processes are given that run through one stream, and `webdataset`
divides the pipelines of that library. One data set is our own: `tokens`, windows of a text in mapped files.
"""
