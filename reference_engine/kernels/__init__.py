"""Operations that torch does not have as one kernel: Triton kernels and their twins in `plain`."""
