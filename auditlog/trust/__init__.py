"""Keys, what a verifier brings from outside, and the verdict over a log.

Needs neither a database nor torch: ``verify`` takes rows, salts and sketches as whoever opened them hands
them over (``LogView``). Nothing here decides *what* is logged, and nothing found inside a run is trusted.
"""
