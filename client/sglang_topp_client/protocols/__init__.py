"""SGLang's and the sidecar's HTTP protocols: write requests, and read rollouts and scores from answers."""
