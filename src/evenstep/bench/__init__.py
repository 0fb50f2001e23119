"""How well a script scales, and why not better: `evenstep bench`.

In reading order:

    command    `evenstep bench`: measures a script, or runs one of the sub-commands of `predict/`
    measure/   runs of a script on several numbers of replicas, what each rank records, and a step in parts
    explain/   causes with their expected gain, the report, its pictures and its page
    predict/   steps and memory on ranks that one doesn't have: `bench network`, `predict`, `memory`

`explain` reads the results of `measure`, and `predict --predict` reads the report of `explain`.
"""
