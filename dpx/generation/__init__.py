"""Completes prompts by a causal decoder: reads prompts, decodes with a cache of keys and values, writes completions as they are made."""
