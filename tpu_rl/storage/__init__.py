"""Objects in buckets (gs://), local copies of them, and the user's cache folder.

`gcs` reads and writes objects. `local_copies` copies a model or data files, for code that reads
files. This package imports nothing by itself.
"""
