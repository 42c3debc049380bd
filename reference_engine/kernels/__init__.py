"""Operations that torch lacks as a single kernel: Triton kernels and their twins in `plain`."""
