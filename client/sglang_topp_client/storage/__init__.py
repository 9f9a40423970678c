"""Save rollouts to Parquet files, load them, and add a trainer's log-probs and rewards."""
