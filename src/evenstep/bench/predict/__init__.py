"""Steps and memory on ranks that one doesn't have: cost, simulation, network and memory.

In reading order. The time of a step:

    cost           what a collective costs: links, nodes, algorithms             pure
    network        `bench network`: latency and bandwidth, measured on this world's transport
    simulate       a step on ranks that one doesn't have                         pure
    profile        what a step is made of, from a wrapped model or a report: the input of `simulate`
    predict        `bench predict`: a measured step, simulated on more ranks

The memory of a rank:

    footprint      what a rank keeps in memory, by way of sharding               pure
    servers        the same with parameter servers, and what travels         pure
    memory_probe   the sizes behind that, measured in a process that runs the script
    memory         `bench memory`, also called `evenstep estimate`

    arguments      arguments and JSON files that these commands share
"""
