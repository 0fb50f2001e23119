"""Observers of a model: monitors that compare ranks or check gradients, and one that steps optimizers in backward.

Reading order: `monitors` builds those of a model. `drift` compares parameters, `options` compares optimizers' options,
`nonfinite` finds gradients that are infinite or not a number. `digests` are the numbers by which tensors are compared.
"""
