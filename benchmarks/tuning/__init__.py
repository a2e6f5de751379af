"""What chose the launch configurations of kernels."""
