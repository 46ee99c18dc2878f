"""The ops of this library inside models of other libraries."""
