"""What torch has not in one piece: Triton kernels, each with its twin in `plain`."""
