"""The `torch.distributed` backend "evenstep": torch programs exchange CPU tensors through shared memory.

Reading order:

- `backend`: `register_backend`, and `EvenstepGroup`, the process group that torch makes. It owns a Gloo, an NCCL and a
  transport, and applies deadlines that torch changes.
- `calls`: `GroupCalls`, its base class, has the methods that torch calls for collectives. Each reads torch's arguments,
  and launches the transport's collective or falls back to Gloo. A fallback is counted and compared between ranks.
- `observers`: makes those calls visible to torch's profiler and to `CommDebugMode`.
- `work`: `GroupWork`, the handle that torch waits for, with its future; `GlooWork`, a call that Gloo carries.
"""
