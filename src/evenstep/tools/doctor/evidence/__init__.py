"""What the events of a run show: findings, and what they refute. All of it is pure.

In reading order:

    verdict       everything put together, and why a run has ended early
    scene         what the judges share: names of files, loops put together of their events
    data          the same samples, order or draws; different numbers of batches
    output        lines, bars, trackers, files, checkpoints
    collectives   calls of some ranks only, and who waits for whom
    stepping      accumulation, divisors, clipping, parameters, tokens, schedules
    starting      ports, backends, devices, the end of the process group
"""
