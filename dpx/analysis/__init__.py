"""Analyses: one file each, a declaration in, tables out. They train nothing; some read other runs."""
