"""Several runs as one recipe: stages, what feeds what, and one statement of what each stage protects."""
