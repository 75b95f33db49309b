"""One run on many processes: the same bins, the same noise, one reduction a step. `privatize` uses it by itself."""
