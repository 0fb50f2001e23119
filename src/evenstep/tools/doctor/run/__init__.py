"""Running a script on some ranks under watch: what each of them does becomes a list of events.

In reading order:

    events               what a rank writes down, and the evidence of all of them       pure
    runs                 starts the ranks, reads along, and ends a run that would hang
    hangs                whether ranks wait for one that will never come                pure
    probe                one rank: becomes the script, and ends it after enough steps
    recorder             there: writes events with the lines of the script that led to them
    record_data          there: loaders, samples, random streams; epochs end early
    record_steps         there: passes, losses, optimizers, schedulers
    record_collectives   there: calls that all ranks have to make
    record_devices       there: lines where the host waits for a GPU
    record_output        there: lines, trackers, files, checkpoints
"""
