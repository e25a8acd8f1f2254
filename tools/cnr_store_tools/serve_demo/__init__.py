"""``cnr serve-demo``: a trainer, maintenance, two inference processes and an online training on one store, with kills.

Open ``run`` first: it starts, kills and restarts the processes ``saving``, ``maintaining``, ``inferring`` and
``learning``. ``report`` computes figures and problems from their events. ``witness`` checks the version of a lookup.
"""
