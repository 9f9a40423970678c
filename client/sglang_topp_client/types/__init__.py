"""The client's result types, `Rollout` and `Score`, with helpers to join parts and to render HTML."""
