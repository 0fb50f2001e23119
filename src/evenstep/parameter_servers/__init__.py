"""Data parallelism with parameter servers, over torch's RPC (TensorPipe).

Workers compute gradients and push them; servers hold the parameters, run the optimizer and answer with what has become
of them. Nothing below knows of this room, and it uses no engine, transport or world of the rooms below: workers of an
asynchronous run take different steps on purpose. See docs/how-to/parameter-server.md.

Reading order:

    parameter_server.py  `evenstep.parameter_server` and the worker's handle: backward, step, pull
    worker/              a worker's way to the servers
    recipe.py            what the script gave to make models and optimizers from
    server/              what servers hold, how they decide, and what they save
    remote.py            RPC between processes; the only file that needs torch.distributed.rpc
    preparation.py       what is refused before anything connects, and how processes compare what they were given
    embeddings/          tables of embeddings, divided over servers by row
    layout.py            which server has which parameters, and tensors packed into few
    roles.py             which ranks are workers, and which are servers
    traffic.py           what a worker sends and receives, and how long it waits
"""
