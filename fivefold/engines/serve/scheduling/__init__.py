"""Which tokens run next, and in which blocks of the key/value cache: plain Python, no torch.

What holds between any two calls, and what `Scheduler.invariants` checks:

1. Every block is in exactly one state: free, cached (nobody's, but found by its prefix) or owned.
2. A block's reference count is the number of block tables that list it; owned means above 0.
3. Only running sequences have blocks: those that `computed` needs, none beyond their tokens. (One
   that ends while a plan is open keeps its blocks until the plan is handed back.)
4. A block that others can see (shared, or in the prefix index) is never written: it is full and
   computed, or it is copied first.
5. Tokens [0, computed) of a sequence are in its blocks; a plan computes [computed, ...), so no
   token is scheduled twice. One plan is open at a time.
6. While there is work, a plan has a chunk; the first sequence in order is never put back. As only
   finitely many come before any sequence, every sequence ends.
"""
