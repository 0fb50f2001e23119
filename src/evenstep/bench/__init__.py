"""How well a script scales, and why not better: `evenstep bench`.

A script, measured on this host:

    command.py     the command's arguments, and what is called
    plan.py        which runs, in which order                                pure
    runs.py        starting them, and reading what the ranks have left
    rank.py        one rank of such a run: prepares the process, becomes the user's script
    probe.py       counts steps there, ends the run, leaves the record
    models.py      when forward and backward passes begin and end, for torch's own wrapper too
    torch_buckets.py   when torch's buckets set out
    loaders.py     when the script waits for data
    scratch.py     what the script saves goes elsewhere, or nowhere
    gpu.py         what makes the host wait for a GPU
    records.py     what a rank leaves: marks in, steps in parts out          pure
    decompose.py   steps of all ranks in, where the time went out            pure
    scaling.py     runs in, efficiency with its spread out                   pure
    findings.py    measurements in, causes with their expected gain out      pure
    report.py      all of that as one dictionary, and as tables
    plots.py       and as pictures
    page.py        and as one HTML file

What isn't there, or can't be run here:

    modes.py       what `evenstep bench` does besides running a script
    cost.py        what a collective costs: links, hosts, algorithms         pure
    network.py     --network: what the world's transport makes of the network
    simulate.py    a step on ranks that one doesn't have                     pure
    profile.py     what a step is made of, from what a wrapped model has recorded
    predict.py     --predict: a measured step, simulated on more ranks
    published.py   --published: cases that others have measured              pure
    footprint.py   what a rank keeps in memory                               pure
    memory.py      --memory and `evenstep estimate`, with memory_probe.py
"""
