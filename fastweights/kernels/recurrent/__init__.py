"""A few tokens without gradients: the state is read once, updated in registers token by token, and written once."""
