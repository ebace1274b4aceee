"""The jobs of the command line: each job is a declaration called with (experiment, run folder)."""
