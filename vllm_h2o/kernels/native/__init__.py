"""C++ kernels for CPUs: compiled with the machine's compiler at first use, then cached."""
