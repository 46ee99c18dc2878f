"""Softmax attention of one query per sequence over a preallocated ring of keys and values."""
