"""The evidence in one file: a bundle of a run, its stand-alone verifier, and proofs of single entries.

``export`` and ``proof`` write. ``verify_gradtrail`` reads: one file, written from FORMAT.md alone, that shares no code
with the rest of the package. Not here: the run folder itself (``ledger``) and its own verifier (``trust``).
"""
