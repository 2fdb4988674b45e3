// Memory that a call needs while it runs, on cache lines of its own, kept by the thread for the next.
//
// Blocks that came and went between tensors would leave holes in the heap, which smaller tensors
// then split (measured by `benches/train_step.py`: 60 MiB of a step of SmolLM2-135M).
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>

namespace fivefold {

inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

struct Block {
  float* data;
  long bytes;
};

// The largest blocks that a thread has let go of.
class KeptBlocks {
  static constexpr int MOST = 4;
  // More would be too much to keep for a call that may not come again.
  static constexpr long TOO_LARGE = 16 << 20;
  Block blocks[MOST] = {};

 public:
  ~KeptBlocks() {
    for (Block& block : blocks) std::free(block.data);
  }

  // The smallest one of at least so many bytes, or none.
  Block take(long bytes) {
    Block* best = nullptr;
    for (Block& block : blocks)
      if (block.bytes >= bytes && (!best || block.bytes < best->bytes)) best = &block;
    return best ? std::exchange(*best, Block{}) : Block{};
  }

  // Frees the smallest of what there is then.
  void put(Block given) {
    const auto smaller = [](const Block& a, const Block& b) { return a.bytes < b.bytes; };
    Block& least = *std::min_element(blocks, blocks + MOST, smaller);
    if (given.bytes > least.bytes && given.bytes <= TOO_LARGE) std::swap(given, least);
    std::free(given.data);
  }

  static KeptBlocks& of_thread() {
    static thread_local KeptBlocks kept;
    return kept;
  }
};

// A sanitizer is to see the end of what was asked for, not of a larger block.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool KEEPS_BLOCKS = false;
#else
constexpr bool KEEPS_BLOCKS = true;
#endif

struct LetGo {
  long bytes = 0;
  void operator()(float* data) const {
    if (KEEPS_BLOCKS) KeptBlocks::of_thread().put({data, bytes});
    else std::free(data);
  }
};
using Floats = std::unique_ptr<float, LetGo>;

// Uninitialised. Null where memory is missing.
inline Floats allocate_floats(long count) {
  const long bytes = round_up(std::max<long>(count, 1) * 4, 64);
  Block found = KEEPS_BLOCKS ? KeptBlocks::of_thread().take(bytes) : Block{};
  if (!found.data) found = {(float*)std::aligned_alloc(64, bytes), bytes};
  return Floats(found.data, LetGo{found.bytes});
}

}  // namespace fivefold
