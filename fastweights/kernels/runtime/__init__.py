"""The launch layer: private names of triton and torch, launch plans, and the placeholders that plans are recorded on."""
