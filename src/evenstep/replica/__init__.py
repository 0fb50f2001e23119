"""Keeping replicas equal: the gradient that is applied is the gradient of the global mean loss, on every rank.

From plain data to effects: `layout` (which gradient lies where), `reducer` (when a bucket may travel), `weighting`
(what is summed and by what it is divided), `agreement` (are the models the same), `batches` (splitting a batch, and
what stands in for an empty one), `engine` (executes all this in autograd's hooks), `module_buffers`, and
`distributed` (the class that users see). `reference` is the slow, obvious engine that the tests compare with.
"""
