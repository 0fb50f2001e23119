"""What is wrong with a training script: rules, what reading the script finds, what running it confirms.

In reading order:

    rule          a rule, and a finding: one mistake at one place                       pure
    rules/        every mistake that is known, a file each: its page, `read`, `seen`
    asking        what rules ask a script that was read, and mends in its own words
    run/          a run of some steps on some ranks: what they record, and the end of a run that would hang
    scene, calls  what rules ask a run: samples, lines and steps; calls and who waits   pure
    verdict       what a run has shown, and why it ended early                          pure
    comparing     where nothing was found: is it what one process computes?
    findings      what was read and what was seen, merged                               pure
    report        findings as text, JSON and SARIF
    examination   `evenstep doctor`: reads, runs, compares, reports
"""
