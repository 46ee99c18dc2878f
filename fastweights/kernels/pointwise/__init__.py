"""What stands around a memory: short convolution with SiLU and L2 norm, gated RMSNorm. One pass over the tensors each way."""
