"""Runs a script on some ranks and records what each of them does as a list of events.

In reading order:

    events     the events that a rank writes, and the evidence of all ranks    pure
    runs       starts the ranks, follows their events, and ends a run that would hang
    hangs      whether ranks wait for a rank that will never come              pure
    probe      in a rank: runs the script, and ends it after enough steps
    writer     in a rank: writes events with the lines of the script that led to them
    notes      in a rank: records passes, steps, collectives and loaders; ends epochs early
    samples    in a rank: digests of samples, facts of loaders, random states
"""
