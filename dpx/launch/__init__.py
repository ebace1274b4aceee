"""Runs the job of a composed config in its folder, once or in a sweep."""
