"""What a person looks at: one HTML page per run."""
