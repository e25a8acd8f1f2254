"""``cnr serve-demo``: a trainer, maintenance, two inference processes and an online training on one store, with kills.

``run`` orchestrates: ``schedule`` says who is killed when, ``supervised`` starts, kills and restarts processes and
reads what they tell, ``tally`` makes figures and a verdict of that, ``report`` prints. The processes are ``saving``,
``maintaining``, ``inferring`` and ``learning``, all started through ``worker``. ``witness`` is how a lookup proves that
it saw one version.
"""
