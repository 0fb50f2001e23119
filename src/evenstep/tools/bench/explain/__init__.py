"""From measurements to findings, a report and a plot.

In reading order:

    findings   measurements in, causes with their expected gain out              pure
    report     all of that as one dictionary (`report.json`), and as tables
    plots      efficiency as a picture
"""
