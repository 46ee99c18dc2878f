"""Results of our own: one module per question, which declares it as `CLAIM` before it is measured."""
