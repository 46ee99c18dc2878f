"""The parts of the kernel benchmark: cases, peers, accuracy, timing, floors."""
