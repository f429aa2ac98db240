"""What the user turns on: audit mode for a plain loop and for the Hugging Face Trainer.

Joins capture (gradients per sample) with ``auditlog`` (records of them). Nothing here computes a gradient.
"""
