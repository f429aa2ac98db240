"""The data manifest: which files and rows a run trains on, fixed by digests before the first step.

A sample's only name afterwards is its *sample index*: its position over all source files in path order. What the
log binds it to is the file's digest, the row's number and the row's digest, so files that join later move nothing.
Reads files; knows neither the log nor a model.
"""

from auditlog.datamanifest.manifest import DataManifest

__all__ = ["DataManifest"]
