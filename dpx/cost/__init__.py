"""The cost of a step: FLOPs and memory by arithmetic, traced, and compiled."""
