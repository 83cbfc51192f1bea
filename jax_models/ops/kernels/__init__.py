"""What a platform needs: kernels of TPUs and GPUs, and cuDNN, each behind one call."""
