"""Number formats: what is computed in which, and how fp16 is kept from underflowing."""
