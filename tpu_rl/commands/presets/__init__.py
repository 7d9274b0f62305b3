"""One small file per experiment, each with a value named CONFIG."""
