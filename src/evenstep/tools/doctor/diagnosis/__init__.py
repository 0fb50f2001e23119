"""The rules that reading decides, by group; each file has one `check`, which takes a script and gives findings.

In reading order:

    asking        what several groups ask: is this on all ranks, what is this name made of
    data          which rank loads which samples
    output        what every rank prints, logs and writes
    devices       which GPU a rank uses, and when the host waits for it
    collectives   every rank calls the same ones
    step          accumulation, clipping, the optimizer, the loss, schedules
    starting      how ranks come to be, and how they end
"""
