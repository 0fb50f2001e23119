"""What a checkpoint's files hold. Everything but `random_streams` is pure.

`tree` takes a state dictionary apart into JSON and named tensors; `plan` decides which rank writes which of them;
`regions` says which elements of a DTensor a rank holds; `payload` lays out a safetensors file; `manifest` describes and
checks the whole. `random_streams` turns the generators of a rank into state that a checkpoint can hold.
"""
