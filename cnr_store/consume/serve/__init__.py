"""The loader: which version to serve, how it gets there, and who is shown it."""
