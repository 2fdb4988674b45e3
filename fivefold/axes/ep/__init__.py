"""The expert axis: each rank holds some of the experts, and tokens travel to theirs."""
