"""Data parallelism with parameter servers, over evenstep's own sockets.

Workers compute gradients and push them; servers hold the parameters, run the optimizer and answer with the new
parameters. Workers of an asynchronous run take different steps on purpose, so they have no common world and use neither
the engine nor the transports. Only the servers share a world, to save their parts. See docs/how-to/parameter-server.md.

    worker   step   ── hold: its part of the gradients ──>  every other server, which keeps it
                    ── step: the first server's part ────>  the first server, which decides for all
             <── the newest parameters ── each server, when it has executed the decision

Reading order:

    api.py          `evenstep.parameter_server` and a worker's handle: backward, step, pull
    batches.py      `ps.queue()`: one loader's batches, divided over workers
    meeting.py      how processes find each other, and prove that they belong to the run
    worker.py       a worker's calls to all servers
    server.py       the calls that a server answers, and the one thread that executes decisions
    wire.py         calls between processes: frames, handshakes, lost peers
    checkpoint.py   each server's part of model, optimizer, tables and queue: saved and restored
    preparation.py  the ranks' roles; builds, checks and compares the script's arguments
    shard.py        the division of parameters over servers; one server's parameters, optimizer and tables
    deciding/       which pushes make an update, which workers may continue, which worker gets which batch. Pure
    embedding/      embedding tables, divided over servers by row
"""
