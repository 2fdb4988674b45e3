"""What a rank has to hold, to the byte where that is arithmetic: state, activations, buffers."""
