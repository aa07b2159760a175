"""The portable path: plain PyTorch on any device. `attention` is exact attention, `fp8` simulates the FP8 kernels."""
