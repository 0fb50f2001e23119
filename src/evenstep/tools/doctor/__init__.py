"""Finds mistakes in a training script: rules read the script, and a watched run confirms what they found.

In reading order:

    rule          a rule, and a finding: one mistake at one place                       pure
    rules/        one file for each known mistake: its page, `read`, `seen`
    asking        questions of rules about the script's source, and mends with its own names
    run/          a run of some steps on some ranks: records events, and ends a run that would hang
    scene, calls  questions of rules about a run: samples, lines, steps; calls, waits   pure
    verdict       from a run's events to findings, and why the run ended early          pure
    comparing     a script without findings, compared with one process
    findings      findings of reading and of the run, merged                            pure
    report        findings as text, JSON and SARIF
    examination   `evenstep doctor`: reads, runs, compares, reports
    fixes         `--fix`: applies the mends that are certain
"""
