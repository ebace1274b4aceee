"""What a run's parameters are before its first step, and what that costs: drawn, another run's, or from a file."""
