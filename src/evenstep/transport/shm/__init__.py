"""The transport of CPU ranks of one node, through a segment of shared memory.

An all-reduce, in reading order:

1. `core.transport`: `Transport.run`, common to all transports, checks the call and makes its tensors flat. `transport`:
   `SharedMemoryTransport._start` makes a `SharedWork` from it. The class is `Lanes` (messages, below), which is a
   `CallQueue`, which is a `Transport`.
2. `queue`: `_start_all` queues the call and shows its call header to the other ranks; `Pending.wait` calls `_finish`,
   which runs the programs of the queue until the call has ended. `progress` has the thread that advances calls for
   which no other thread waits.
3. `collectives`: `ProgramContext` compares the call headers of all ranks. A short tensor is in its rank's slot
   already, and `_eager_all_reduce` adds all of it. A long one has a program, a generator that stops when it needs the
   other ranks: `_all_reduce` reduces one slice of all ranks' tensors (`core.reduction`), and writes it to all of them,
   if all are buckets in the transport's own memory. Other tensors are copied chunk by chunk through slots
   (`_chunked_all_reduce`), or whole if they are short (`_whole_all_reduce`): see [Note: three protocols].
4. `sync`: semaphores with which ranks signal that they have passed a phase of a call. A rank that waits for such
   signals spins, then sleeps, and checks through `peers` whether the missing ranks are alive.
5. Back in `queue`: the call ends, the result is copied to the caller's tensor if that isn't contiguous, and `wait`
   returns.

Below this: `segment` has the memory and its layout, `allocator` the buckets in it. `handshake` connects the ranks at
the start: it makes the segment, and every rank's transport on it.

Messages between two ranks are separate from this: see `lanes`.

Imports point down in the order handshake, transport, lanes, queue, collectives, allocator, segment, progress, sync,
peers.
"""
