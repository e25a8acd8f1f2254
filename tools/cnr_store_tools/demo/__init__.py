"""``cnr demo``: a small DLRM on click logs, killed in the middle of a save, restored, finished, and compared.

The model and data side (``traffic``, ``datasets``, ``batches``, ``model``, ``adagrad``, ``train``) knows no store and
trains bit-deterministically. ``trainer`` is the process that is killed, ``run`` orchestrates, ``report`` prints.
"""
