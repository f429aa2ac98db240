"""What is asked of a finished run: which records pushed an answer, how sure that is, and whether it is specific.

``estimators``, ``uncertainty`` and ``specificity`` are pure functions over arrays; ``query`` asks a model and a run;
``result`` is the document, ``record`` puts it into the custody log, ``show`` prints it. Nothing here trains, or writes
to the run itself.
"""
