"""Data sets, and the batches that a loader gets from them.

`source` is the seam: what a loader needs. `samples` implements it for data sets that number their samples, `streams`
for iterable ones, of which `webdataset` divides that library's pipelines. `same_stream` compares what ranks draw of a
sampler, and what the processes of one stream are given; `same_data` compares the ranks' data sets. One data set is our
own: `tokens`, windows of a text in mapped files.
"""
