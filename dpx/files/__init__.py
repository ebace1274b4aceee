"""What is on disk: run folders, records as JSON, checksums, and the arrays of checkpoints."""
