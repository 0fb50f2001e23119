"""How well a script scales, and why not better: `evenstep bench`.

command.py     the command's arguments, and what is called
plan.py        which runs, in which order                                pure
runs.py        starting them, and reading what the ranks have left
rank.py        one rank of such a run: prepares the process, becomes the user's script
probe.py       counts steps there, ends the run, leaves the record
models.py      when forward and backward passes begin and end, for torch's own wrapper too
loaders.py     when the script waits for data
scratch.py     files that the script saves go elsewhere
gpu.py         what makes the host wait for a GPU
records.py     what a rank leaves: marks in, steps in parts out          pure
decompose.py   steps of all ranks in, where the time went out            pure
scaling.py     runs in, efficiency with its spread out                   pure
findings.py    measurements in, causes with their expected gain out      pure
report.py      all of that as one dictionary, and as tables
plots.py       and as pictures
page.py        and as one HTML file
"""
