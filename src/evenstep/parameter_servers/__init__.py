"""Data parallelism with parameter servers, over sockets of our own.

Workers compute gradients and push them; servers hold the parameters, run the optimizer and answer with what has become
of them. Workers of an asynchronous run take different steps on purpose, so they share no world and use no engine or
transport of the rooms below; only the servers share a world, to save their parts. See docs/how-to/parameter-server.md.

    worker   step   ── hold: its part of the gradients ──>  every other server, which keeps it
                    ── step: the first server's part ────>  the first server, which decides for all
             <── the newest parameters ── each server, when it has executed the decision

Reading order:

    api.py          `evenstep.parameter_server` and the worker's handle: backward, step, pull
    batches.py      `ps.queue()`: one loader's batches, divided over workers
    meeting.py      how processes find each other, and what proves who belongs to the run
    worker.py       a worker's calls of all servers
    server.py       what is asked of a server, and the one thread that executes
    wire.py         calls between processes: frames, handshakes, who is lost
    checkpoint.py   what each server writes of a model, an optimizer, tables and the queue, and how they go on from it
    preparation.py  the ranks' roles, and what a script has given: made, refused, compared
    shard.py        which server has which parameters; one server's parameters, optimizer and tables
    deciding/       which pushes make an update, who may go on, and which worker takes which batch. Pure
    embedding/      tables of embeddings, divided over servers by row
"""
