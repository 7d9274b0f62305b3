"""Is everything ready for a run, and does it learn?

host_agreement   checks that the processes of a run have the same settings, code and files
secret_settings  refuses settings that contain a secret
training_health  warnings about a run that learns nothing
nan_recovery     the way back from steps that are not finite
"""
