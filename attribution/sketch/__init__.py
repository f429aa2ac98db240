"""The linear map from a whole gradient to a few thousand numbers, and its int8 form.

What is projected and where it lands. Nothing here knows about hooks, training or the log.
"""
