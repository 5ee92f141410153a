// select_tokens: a block a row. Three histograms over the bits of a score, from the top, find the
// least score to choose; which tokens are chosen is a bit each in shared memory, and a prefix sum
// over the bits writes them in order.
#pragma once

#include "device.cuh"
#include "dustin/kernels.h"

namespace dustin::cuda {

inline constexpr int kSelectThreads = 1024;
inline constexpr int kSelectWarps = kSelectThreads / 32;
inline constexpr int kBins = 2048;

// Floats as integers of the same order; NaN is the largest, -0 equals 0.
DUSTIN_DEVICE uint32_t order_of(float score) {
  const uint32_t bits = bits_of(score + 0.f);  // -0 becomes 0
  if (score != score) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The lowest `count` bits, 0 ... 32 of them.
DUSTIN_DEVICE uint32_t low_bits(int count) {
  return count <= 0 ? 0u : count >= 32 ? 0xffffffffu : (1u << count) - 1;
}

// The bits of word `word` that lie in [begin, end).
DUSTIN_DEVICE uint32_t range_bits(int word, int begin, int end) {
  return low_bits(end - word * 32) & ~low_bits(begin - word * 32);
}

struct alignas(16) SelectShared {
  int histogram[kBins];
  int sums[kSelectWarps];
  int bin, above;
};

// Words of bits for a row of `length` tokens.
DUSTIN_HOST_DEVICE int64_t words_of(int64_t length) { return (length + 31) / 32; }

DUSTIN_HOST_DEVICE int64_t select_shared_bytes(int64_t length) {
  // Two sets of bits, rounded up to 16 bytes.
  return static_cast<int64_t>(sizeof(SelectShared)) + (2 * words_of(length) + 3) / 4 * 16;
}

class RowSelection {
 public:
  DUSTIN_DEVICE RowSelection(int length, int sink, int window)
      : length_(length),
        words_(static_cast<int>(words_of(length))),
        shared_(*reinterpret_cast<SelectShared*>(shared_memory())),
        chosen_(reinterpret_cast<uint32_t*>(shared_memory() + sizeof(SelectShared))),
        equal_(chosen_ + words_),
        warp_(warp_of_block()) {
    for (int word = threadIdx.x; word < words_; word += kSelectThreads)
      chosen_[word] = range_bits(word, 0, sink) | range_bits(word, length - window, length);
    __syncthreads();
  }

  // Chooses the `count` best that are not chosen yet; of equal ones the earliest.
  DUSTIN_DEVICE void take_top(const float* scores, int count) {
    if (count <= 0) return;
    uint32_t prefix = 0, known = 0;  // what is known of the least score's bits
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
      const uint32_t digit = shift == 0 ? 0x3ffu : 0x7ffu;
      count -= find_digit(scores, count, prefix, known, shift, digit);
      prefix |= static_cast<uint32_t>(shared_.bin) << shift;
      known |= digit << shift;
    }
    for (int word = warp_; word < words_; word += kSelectWarps) {
      const auto [free, order] = candidate(scores, word);
      const uint32_t more = ballot(free && order > prefix);
      const uint32_t same = ballot(free && order == prefix);
      if (lane() == 0) {
        chosen_[word] |= more;
        equal_[word] = same;
      }
    }
    __syncthreads();
    take_first(count);
  }

  // The chosen tokens, ascending.
  DUSTIN_DEVICE void write(int32_t* indices) {
    const auto [first, last] = my_words();
    int at = sum_before(count_bits(chosen_, first, last));
    for (int word = first; word < last; ++word)
      for (uint32_t bits = chosen_[word]; bits; bits &= bits - 1)
        indices[at++] = word * 32 + lowest_bit(bits);
  }

 private:
  struct Candidate {
    bool free;
    uint32_t order;
  };
  struct Words {
    int first, last;
  };

  static DUSTIN_DEVICE int lane() { return threadIdx.x % 32; }

  // This lane's token of a word: whether it may be chosen, and its score.
  DUSTIN_DEVICE Candidate candidate(const float* scores, int word) const {
    const int j = word * 32 + lane();
    const bool free = j < length_ && !(chosen_[word] >> lane() & 1u);
    return {free, free ? order_of(scores[j]) : 0u};
  }

  // Finds the digit, left in shared_.bin, of the `count`-th best score whose known bits are
  // `prefix`; returns how many have a larger one.
  DUSTIN_DEVICE int find_digit(const float* scores, int count, uint32_t prefix, uint32_t known,
                               int shift, uint32_t digit) {
    for (int bin = threadIdx.x; bin < kBins; bin += kSelectThreads) shared_.histogram[bin] = 0;
    __syncthreads();
    for (int word = warp_; word < words_; word += kSelectWarps) {
      const auto [free, order] = candidate(scores, word);
      const bool counts = free && (order & known) == prefix;
      const int bin = static_cast<int>(order >> shift & digit);
      // Most scores of a row are alike, often all of them: lanes with the first one's bin are
      // counted at once instead of one after another.
      const uint32_t counting = ballot(counts);
      if (!counting) continue;
      const int leader = lowest_bit(counting);
      const int leading_bin = shuffle(bin, leader);
      const uint32_t alike = ballot(counts && bin == leading_bin);
      if (lane() == leader) add_shared(&shared_.histogram[bin], population(alike));
      if (counts && bin != leading_bin) add_shared(&shared_.histogram[bin], 1);
    }
    __syncthreads();
    // Thread i looks at the i-th two bins from the top.
    const int top = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
    const int upper = shared_.histogram[top], lower = shared_.histogram[top - 1];
    const int before = sum_before(upper + lower);
    if (before < count && count <= before + upper + lower) {
      const bool in_upper = count <= before + upper;
      shared_.bin = in_upper ? top : top - 1;
      shared_.above = in_upper ? before : before + upper;
    }
    __syncthreads();
    return shared_.above;
  }

  // Chooses the first `count` tokens of those marked as equal.
  DUSTIN_DEVICE void take_first(int count) {
    const auto [first, last] = my_words();
    int before = sum_before(count_bits(equal_, first, last));
    for (int word = first; word < last; ++word) {
      for (uint32_t bits = equal_[word]; bits && before < count; bits &= bits - 1, ++before)
        chosen_[word] |= bits & (0u - bits);
    }
    __syncthreads();
  }

  // The words that this thread counts: consecutive ones, so that prefix sums are in order.
  DUSTIN_DEVICE Words my_words() const {
    const int each = (words_ + kSelectThreads - 1) / kSelectThreads;
    const int first = min(words_, static_cast<int>(threadIdx.x) * each);
    return {first, min(words_, first + each)};
  }

  static DUSTIN_DEVICE int count_bits(const uint32_t* set, int first, int last) {
    int count = 0;
    for (int word = first; word < last; ++word) count += population(set[word]);
    return count;
  }

  // The sum of x over the threads before this one.
  DUSTIN_DEVICE int sum_before(int x) {
    int sum = x;
    for (int by = 1; by < 32; by *= 2) {
      const int other = shuffle_up(sum, by);
      if (lane() >= by) sum += other;
    }
    if (lane() == 31) shared_.sums[warp_] = sum;
    __syncthreads();
    int warps = shared_.sums[lane()];
    __syncthreads();  // the sums are read before the next call writes them
    for (int by = 1; by < 32; by *= 2) {
      const int other = shuffle_up(warps, by);
      if (lane() >= by) warps += other;
    }
    const int earlier = shuffle(warps, (warp_ + 31) % 32);
    return sum - x + (warp_ > 0 ? earlier : 0);
  }

  const int length_, words_;
  SelectShared& shared_;
  uint32_t* const chosen_;
  uint32_t* const equal_;
  const int warp_;
};

DUSTIN_KERNEL(kSelectThreads, 1)
select_tokens_kernel(const DUSTIN_GRID_CONSTANT DustinSelectTokensParams p) {
  const int b = blockIdx.x, thread = threadIdx.x;
  const int length = p.lengths[b], count = min(length, p.budget);
  int32_t* const indices = p.indices + b * p.indices_stride;
  if (thread == 0) p.counts[b] = count;
  const float* target = p.target_scores ? p.target_scores + b * p.target_stride : nullptr;
  const float* draft = p.draft_scores ? p.draft_scores + b * p.draft_stride : nullptr;
  if (!target) {
    target = draft;
    draft = nullptr;
  }
  if (length <= p.budget || !target) {
    // Everything, or the window grows to what the sink leaves.
    const int skipped = length - count, sink = skipped > 0 ? p.sink : count;
    for (int i = thread; i < p.budget; i += kSelectThreads)
      indices[i] = i >= count ? -1 : i < sink ? i : i + skipped;
    return;
  }
  DUSTIN_ASSERT(!p.target_scores || length <= p.target_width);
  DUSTIN_ASSERT(!p.draft_scores || length <= p.draft_width);
  RowSelection row(length, p.sink, p.window);
  const int free = p.budget - p.sink - p.window;
  const int ahead = draft ? min(p.lookahead, free) : 0;
  if (draft) row.take_top(draft, ahead);
  row.take_top(target, free - ahead);
  row.write(indices);
}

}  // namespace dustin::cuda
