"""The HTTP protocols of SGLang and the sidecar: write requests, and read rollouts and scores from answers."""
