"""Result types of the client: `Rollout`, `Score`, the weight version of each token, and joined rollouts."""
