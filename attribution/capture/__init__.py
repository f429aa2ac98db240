"""From hooks to one gradient per sample: captured, never recomputed, and checked against what the optimizer gets.

Hooks capture, pure functions compute; nothing here writes to a log.
"""
