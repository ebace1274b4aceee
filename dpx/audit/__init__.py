"""Does a privacy claim survive an attack on what was released? Canaries, guesses and what the guesses prove."""
