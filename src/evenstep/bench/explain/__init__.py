"""From measurements to findings, a report, a page and plots.

In reading order:

    findings   measurements in, causes with their expected gain out              pure
    report     all of that as one dictionary (`report.json`), and as tables
    plots      as pictures
    page       as one HTML file                                                  pure
"""
