"""The client's result types, `Rollout` and `Score`, with helpers to join and to render rollouts."""
