"""``cnr serve-demo``: a trainer, maintenance, two inference processes and an online training on one store, with kills.

Open ``run`` first: it starts, kills and restarts the processes ``saving``, ``maintaining``, ``inferring`` and
``learning``. ``report`` makes figures and a verdict of their events. ``witness`` is how a lookup proves that it saw one
version.
"""
