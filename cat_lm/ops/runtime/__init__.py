"""What all operators share: the C++ compiler and its threads, Triton's launches, vmap's rules."""
