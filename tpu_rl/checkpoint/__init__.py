"""Checkpoints and run folders, on disks and in object stores.

`manager` saves and restores pytrees with a digest of every array; `train_state_io` does so for a
TrainState. `run_dir`, `spool` and `remote_run` are the folder of a run around its checkpoints.
`lock` and `gcs_lock` let one job at a time into it. This package imports nothing by itself, so that
commands that only read files start without JAX.
"""
