"""Data sets, and the batches that a loader gets from them.

`source` is the seam: what a loader needs. `samples` implements it for data sets that number their samples, `streams`
for iterable ones; `webdataset` divides that library's pipelines. `same_stream` compares the ranks' draws from a
sampler, and the records of all processes of a stream; `same_data` compares the ranks' data sets. One data set is
evenstep's own: `tokens`, windows of a text in mapped files.
"""
