"""A plan in the words of those who run it: a recipe of ours, flags of other systems."""
