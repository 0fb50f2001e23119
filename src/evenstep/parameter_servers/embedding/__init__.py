"""Embedding tables, divided over servers by row.

A worker requests the rows of its batch and pushes their gradients with its step, so that rows and parameters change
together. It never holds a table.

Reading order:

    remote_embedding.py  `evenstep.RemoteEmbedding`, a module of a worker's model; and all such modules of a model
    table.py             a server's share of one table, the optimizers of single rows, and their gradients
    initial_rows.py      the value of a row before it is trained, from its number alone
"""
