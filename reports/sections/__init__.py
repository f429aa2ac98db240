"""The sections of a report, one idea a file: each takes the subject of the report and returns plain blocks.

No layout here, and no number that the evidence does not hold.
"""
