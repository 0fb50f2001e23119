"""A worker's way to the servers.

Reading order:

    rpc_connection.py  over RPC
    connections.py     what a connection can do, and the one of a world of one
"""
