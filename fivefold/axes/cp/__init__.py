"""Context parallelism: ranks that divide the tokens of a sequence."""
