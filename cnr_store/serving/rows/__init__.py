"""The rows that a consumer holds, and the views of them that lookups read, in one process or several."""
