"""Built-in tasks, which make their own problems, and built-in environments.

Each file is reached by its rows in `tpu_rl.wings`; adapters have environments of other packages.
A task has `TASK`; an environment is in the `ENVIRONMENTS` of its file, and a reward in `VERIFIERS`.
"""
