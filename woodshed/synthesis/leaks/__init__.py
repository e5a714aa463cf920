"""Whether a task gives its answer away: what the missing code looks like, and everywhere it could still be found."""
