"""The run folder on disk: database, sketch shards, salts, heads, custody. The only place that knows duckdb.

Writing (``ledger``, ``writer``, ``custody``) and reading (``reader``, ``conservation``) share the wire format
and the table definitions, nothing else. What a log proves is decided in ``auditlog.trust``, not here.
"""
