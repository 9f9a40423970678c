"""The result types, `Rollout` and `Score`, the weight spans of their tokens, and the joining of rollouts."""
