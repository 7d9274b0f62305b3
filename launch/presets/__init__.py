"""One small file per experiment: a value named CONFIG."""
