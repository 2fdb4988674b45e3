"""Why one strategy is better than another, in words that a number stands behind."""
