"""Evidence to document to PDF: what a verified run folder says, laid out for a reader who was not there.

Nothing here computes a number that no log holds, and nothing here loads a model or draws a legal conclusion.
"""
