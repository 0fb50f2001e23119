"""The commands that examine a training script, one package for each, and what they share.

From the ground up:

    reading/    static analysis of a script with LibCST: its calls, names, loops and ranks
    observing/  running a user's script under observation
    estimate/   `evenstep estimate`: how much memory a rank needs
    preflight/  `evenstep env` and `evenstep run --check`
    verify/     `evenstep verify`: are two runs the same?
    bench/      `evenstep bench`: how well a script scales, and why not better
    convert/    `evenstep convert`: a single-process script becomes a data-parallel one
    doctor/     `evenstep doctor`: what is wrong with a script
"""
