"""Audits: canaries attack a privacy statement through what was released, and correct guesses about them give lower bounds on epsilon."""
