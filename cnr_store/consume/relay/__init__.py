"""A copy of the newer end of a store, kept elsewhere for readers near it."""
