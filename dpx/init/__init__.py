"""Loads or draws the parameters of a run before its first step (at random, from another run, or from a file), and charges their privacy
cost.
"""
