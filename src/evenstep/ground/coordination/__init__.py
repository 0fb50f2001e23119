"""How ranks agree before they train: on arguments, on the order of a block, and on a store to find each other.

Reading order:

- `rendezvous_store`: the store through which a run's ranks find each other, for each launcher; `joining` opens it.
- `main_first`: rank 0 runs a block before the others. The signal goes through that store, because a collective has a
  deadline and a download may take longer.
- `agreement`: argument consistency. Public constructors compare their arguments between ranks, and all ranks raise the
  same error. `judge` is pure; the caller's world exchanges the values.
- `mesh`: the dimensions along which ranks divide the work, and the ranks that share samples. Planning is pure.
"""
