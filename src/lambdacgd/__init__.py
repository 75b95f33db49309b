"""lambdacgd."""
