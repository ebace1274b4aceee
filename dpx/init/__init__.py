"""The parameters of a run before its first step (drawn at random, of another run, or from a file), and their privacy cost."""
