"""Request and response models of the sidecar's routes, with parsing and validation of request bodies."""
