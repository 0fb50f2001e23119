"""What is wrong, different, slow or too large in a training script: the commands' own rooms.

From the ground up:

    reading/    a script as calls, names, loops and ranks; LibCST parses
    observing/  somebody's script run under observation
    estimate/   `evenstep estimate`: how much memory a rank needs
    preflight/  `evenstep env` and `evenstep run --check`
    verify/     `evenstep verify`: are two runs the same?
    bench/      `evenstep bench`: how well a script scales, and why not better
    convert/    `evenstep convert`: a single-process script becomes a data-parallel one
    doctor/     `evenstep doctor`: what is wrong with a script
"""
