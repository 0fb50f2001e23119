"""Measured runs of a script: starting them, recording each rank, and dividing steps into parts.

In reading order. What is run, and the process of a rank:

    plan            which runs, in which order                                        pure
    runs            starts them one after the other and reads the records of their ranks
    probe           one rank of such a run: counts steps, ends the run, leaves the record
    models          when forward and backward passes begin and end
    fsdp            what the blocks of FSDP2 wait for
    losses          what its backward passes begin with
    gpu             what makes the CPU wait for a GPU

From records to a curve:

    records         what a rank leaves: marks in, steps in parts out                  pure
    decompose       steps of all ranks in, where the time went out                    pure
    scaling         runs in, efficiency with its spread out                           pure
"""
