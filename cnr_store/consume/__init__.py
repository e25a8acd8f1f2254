"""Consumers of a store: what serves its rows, follows its changes, and carries them on."""

__all__: list[str] = []
