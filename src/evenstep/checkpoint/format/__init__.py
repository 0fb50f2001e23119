"""The content of a checkpoint's files. Everything except `random_streams` is pure.

`tree` splits a state dictionary into JSON and named tensors; `plan` decides which rank writes which of them; `regions`
determines which elements of a DTensor a rank holds; `payload` lays out a safetensors file; `manifest` describes and
checks the whole. `random_streams` turns the generators of a rank into state that a checkpoint can hold.
"""
