"""Which layout, will it fit, how fast, at what cost: answered before anything runs."""
