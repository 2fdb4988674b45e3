"""Native CPU kernels: C++ beside its bindings, one file an operator; compiled when first asked for."""
