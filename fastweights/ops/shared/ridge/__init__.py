"""Ridge regression on a fading past at every token: the computation that `gated_kalmanet` and `mesa` share."""
