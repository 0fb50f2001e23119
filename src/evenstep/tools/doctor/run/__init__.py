"""Running a script on some ranks under watch: what each of them does becomes a list of events.

In reading order:

    events     what a rank writes down, and the evidence of all of them       pure
    runs       starts the ranks, reads along, and ends a run that would hang
    hangs      whether ranks wait for one that will never come                pure
    probe      one rank: becomes the script, and ends it after enough steps
    writer     there: writes events with the lines of the script that led to them
    notes      there: passes, steps, calls that all ranks make, loaders; epochs end early
    samples    there: digests of samples, facts of loaders, random streams
    output     there: lines, trackers, checkpoints
"""
