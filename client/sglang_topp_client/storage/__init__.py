"""Save rollouts to Parquet files, and load them."""
