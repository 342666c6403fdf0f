"""One YAML file that says everything about a run.

`schema.TrainConfig` is the whole, `load.load_config` reads it, `ranks.check_ranks` divides the ranks once
their number is known. Neither torch nor numpy is imported here.
"""
