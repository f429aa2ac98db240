"""The wire format: digests, canonical JSON, commitments, records, chain, tree and signed notes.

Bytes in, bytes out. Nothing here opens a file, asks a clock or knows a database; FORMAT.md is its text.
"""
