"""What a command does: each job is a declaration called with (experiment, run folder)."""
