"""Flat buckets of gradients.

Reading order: `layout` (each gradient's place; pure), `bucket` (a bucket's memory; gradients are views of it), `launch`
(the order in which buckets are sent; pure), `comm_hooks` (torch's protocol for replacing the all-reduce of a bucket).
"""
