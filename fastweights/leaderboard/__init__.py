"""The leaderboard: every mixer of the registry on the same tasks, and the memory rules without training."""
