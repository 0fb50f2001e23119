"""How well a script scales, and why not better: `evenstep bench`.

In reading order:

    command    `evenstep bench run` and `evenstep bench compare`
    measure/   runs of a script on several numbers of replicas, what each rank records, and a step in parts
    explain/   causes with their expected gain, the report and its plot
    compare    scripts beside each other, in alternating rounds

`explain` reads the results of `measure`.
"""
