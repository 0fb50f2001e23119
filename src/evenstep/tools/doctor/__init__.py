"""What is wrong with a training script: rules, what reading the script finds, what running it confirms.

In reading order:

    rules         every mistake that is known: what, why, how to mend it                pure
    findings      one mistake at one place; what was read and what was seen, merged     pure
    diagnosis/    the rules that reading decides, by group
    run/          a run of some steps on some ranks: what they record, and the end of a run that would hang
    evidence/     from what ranks have recorded to findings                             pure
    report        findings as text, JSON and SARIF
    examination   `evenstep doctor`: reads, runs, reports
"""
