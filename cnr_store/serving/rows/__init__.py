"""Rows in memory, and the views of them that lookups read, in one process or several."""
