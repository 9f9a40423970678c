"""Send requests to servers: load balancing, health checks, retries, aborts, and partial rollouts."""
