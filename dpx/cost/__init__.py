"""What a step costs: FLOPs and memory by arithmetic, traced, and compiled."""
