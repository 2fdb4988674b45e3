"""One file a schedule. Each gives `build`: the orders, from the numbers of ranks and micro-batches."""
