"""Kernels in C for what torch does in many small operations; without them torch does it all."""
