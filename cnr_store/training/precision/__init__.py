"""How exact each table is stored, chosen while a training runs: by restores, loss or measured quality.

Never changes a value of the model. Open `rate_control` first.
"""
