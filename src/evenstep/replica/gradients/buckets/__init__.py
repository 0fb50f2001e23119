"""Flat buckets of gradients.

Reading order: `layout` (which gradient lies where; pure), `bucket` (a bucket's memory, of which gradients are views),
`launch` (in which order buckets travel; pure), `comm_hooks` (torch's protocol for other things to do with a bucket).
"""
