"""The pure part of routing: features, complexity, policy, and one explained decision."""
