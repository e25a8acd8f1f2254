"""``cnr demo``: a small DLRM on click logs, killed during a save, restored, finished, and compared.

The modules of model and data (``traffic``, ``click_log``, ``batches``, ``model``, ``adagrad``, ``train``) do not use a
store and train bit-deterministically. ``trainer`` is the process that is killed. ``run`` runs the demonstration.
"""
