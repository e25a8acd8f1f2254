"""Encodings: float rows to integer codes and back. One module per encoding, with its kernels and numpy reference."""
