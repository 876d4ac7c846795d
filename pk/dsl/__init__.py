"""What the user writes: the language, its annotations, and the front end that reads it."""
