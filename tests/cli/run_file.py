"""The run file of a small training, which the tests of the commands vary."""

__all__ = ["RUN"]

RUN = """
length = 32
batch_size = 2
max_steps = 2
evaluation_rows = 2
context_lengths = [16]
output = "trained"
cache = "cache"
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
[tokenizer]
vocab_size = 300
[corpus]
paths = ["text.txt"]
"""
