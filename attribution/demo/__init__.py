"""The demo: one small language model, one year of real mortgage decisions, the whole story in minutes, offline.

``data`` and ``model`` fetch their inputs from two installed PyPI packages, ``recipe`` trains, ``evaluate`` and
``overhead`` measure, ``tamper`` attacks copies, ``story`` tells it. Nothing here is needed by an ordinary run.
"""
