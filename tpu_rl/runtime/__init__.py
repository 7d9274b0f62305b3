"""The process that a run lives in: its peers, signals, devices, watchdog, caches and profiles."""
