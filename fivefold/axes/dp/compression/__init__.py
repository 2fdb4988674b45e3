"""What travels instead of a whole gradient: fewer bits, factors of low rank, the largest elements."""
