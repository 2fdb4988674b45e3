"""Finding computed blocks by the tokens that they and all before them hold.

Full blocks are named by a chain of hashes: a block's key is the hash of its parent's key and its
own tokens; the first one's parent is the hash of the weights' version and the sequence's salt. So
a key stands for the whole prefix, and a lookup is one dictionary access a block. A radix tree over
tokens (Zheng et al. 2024) also finds prefixes that end within a block, but those would have to be
copied, and the tree must be walked and split on every insertion; with small blocks the gain is
below one block a request. The hash is BLAKE2b with 128 bits: prompts come from strangers, and a
collision that one can construct would show one tenant another's answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from fivefold.engines.serve.scheduling.blocks import BlockManager

KEY_BYTES = 16


class PrefixIndex:
    """Keys of full, computed blocks -> blocks. Nobody owns a block by its being here."""

    def __init__(self, blocks: BlockManager, version: bytes = b"") -> None:
        self.blocks = blocks
        self.version = version
        self.tokens_asked = 0
        """Tokens of sequences that looked for their beginning here."""
        self.tokens_hit = 0
        """Those of them that were found."""
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        blocks.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._block_of)

    def extend(
        self, keys: list[bytes], tokens: Sequence[int], salt: bytes, count: int | None = None
    ) -> list[bytes]:
        """Lengthen `keys` in place to those of the first `count` full blocks (all of them)."""
        size = self.blocks.block_size
        count = len(tokens) // size if count is None else count
        key = keys[-1] if keys else self._root(salt)
        for start in range(len(keys) * size, count * size, size):
            contents = array("q", tokens[start : start + size]).tobytes()
            key = blake2b(key + contents, digest_size=KEY_BYTES).digest()
            keys.append(key)
        return keys

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> list[int]:
        """Blocks that hold the beginning of `tokens`, always leaving a token to compute."""
        whole = (len(tokens) - 1) // self.blocks.block_size
        return self.lookup(self.extend([], tokens, salt, whole))

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the leading keys that are known."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, key: bytes, block: int) -> None:
        """A block has become full and computed. Of two with one key the first stays known."""
        if key not in self._block_of:
            self.blocks.name(block)
            self._block_of[key] = block
            self._key_of[block] = key

    def record(self, asked: int, hit: int) -> None:
        """Count a lookup in the statistics."""
        self.tokens_asked += asked
        self.tokens_hit += hit

    def clear(self, version: bytes | None = None) -> None:
        """Forget all blocks; with a new `version` of the weights no old key is ever met again."""
        for block in list(self._key_of):
            self.blocks.unname(block)
        self._block_of.clear()
        self._key_of.clear()
        if version is not None:
            self.version = version

    def invariants(self) -> None:
        """Raise AssertionError naming what is broken."""
        for key, block in self._block_of.items():
            if self._key_of.get(block) != key:
                raise AssertionError(f"block {block} has two keys")
            if not self.blocks.is_named(block):
                raise AssertionError(f"block {block} is in the index, but is not kept for it")
        if len(self._key_of) != len(self._block_of):
            raise AssertionError("blocks and keys of the index do not pair")

    def _root(self, salt: bytes) -> bytes:
        # The length keeps (version, salt) apart from a split elsewhere.
        head = len(self.version).to_bytes(8, "little") + self.version
        return blake2b(head + salt, digest_size=KEY_BYTES).digest()

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
