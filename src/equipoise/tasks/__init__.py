"""A task says what targets are, how predictions are counted, and which numbers come of the counts."""
