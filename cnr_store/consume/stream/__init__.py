"""Changes as Arrow record batches, version by version, and files of them."""
