"""How held rows become those of another version: what differs is decided from records, read, and put beside them."""
