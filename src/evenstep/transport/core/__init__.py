"""Code that several transports use.

1. `validation`: checks arguments before anything is sent, and makes tensors flat.
2. `header`: the fingerprint with which ranks check that they make the same call, and the message if they don't.
3. `reduction`: plans which rank reduces which slice, in which order, with which arithmetic; and reduces.
   `nonfinite_monitor` checks sums for NaN and infinity while they are in the cache.
4. `object_collectives`: exchanges of plain values, encoded by `codec`. `staged` carries such messages over a transport
   for GPUs, `store_gather` through the store, before there is a transport.
5. `worker_thread`: a thread that runs the calls of a transport in order.
6. `last_calls`: the last calls of a process, for the error of a call that times out.
7. `fallback`: counts the calls that Gloo carries because shared memory can't.
"""
