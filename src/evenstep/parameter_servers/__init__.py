"""Data parallelism with parameter servers, over torch's RPC (TensorPipe).

Workers compute gradients and push them; servers hold the parameters, run the optimizer and answer with what has become
of them. Nothing below knows of this room, and it uses no engine, transport or world of the rooms below: workers of an
asynchronous run take different steps on purpose. See docs/how-to/parameter-server.md.

Reading order:

    parameter_server.py  `evenstep.parameter_server` and the worker's handle: backward, step, pull
    remote.py            RPC between workers and servers; the only file that needs torch.distributed.rpc
    connections.py       a worker's way to the servers: what it can do, and the one of a world of one
    shard.py             a server's part of the parameters: its optimizer, and what a mode lets through when
    batch_queue.py       which worker takes which batch of an epoch
    preparation.py       what is refused before anything connects, and how processes compare what they were given
    layout.py            which server has which parameters, and tensors packed into few
    roles.py             which ranks are workers, and which are servers
"""
