"""The CUDA C++ sources of the kernels, compiled at run time by NVRTC."""
